"""What constructors and functions take: names and types of arguments, and how a value fits them."""
