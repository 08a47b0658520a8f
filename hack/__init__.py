"""What developers and the demo need around the product; nothing here is shipped."""
