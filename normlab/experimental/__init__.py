"""Features that may be removed. They import the core; the core never imports them. See README.md."""
