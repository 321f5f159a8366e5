"""Programs and their memory traffic, from the text of the compiler."""
