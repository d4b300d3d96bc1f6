"""Worker output: rules that judge lines, and the tail that reads them."""
