"""HTTP endpoints, one module for each noun. They translate; `store` and the rules decide."""
