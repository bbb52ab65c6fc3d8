"""The console: pages for operators, rendered from what the admin API answers them."""
