"""Pages of the documents that are made from code and recorded results, and the check of links."""
