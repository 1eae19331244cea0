"""The engine `torch`: graphs of ATen, as our own reader of archives compiles them."""
