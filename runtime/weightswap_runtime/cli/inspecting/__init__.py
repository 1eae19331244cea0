"""What `weightswap inspect` finds out, and the forms that it shows it in: text, a tree, a document, a report."""
