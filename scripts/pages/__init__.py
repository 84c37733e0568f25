"""The report's page: looked at in a browser, and measured."""
