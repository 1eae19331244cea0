"""Reports: self-contained HTML files. Commands compose them of typed `blocks`; `page` writes them."""
