"""Reports: single HTML files that load nothing. Commands compose them of typed `blocks`; `page` writes them."""
