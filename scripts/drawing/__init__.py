"""Pictures of the documents, drawn from what the product computes."""
