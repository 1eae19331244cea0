"""What a comparison found, on a terminal and on a page."""
