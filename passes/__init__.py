"""The graph passes, one a file, in pipeline order: capture, find_attention, find_cache, plan, rewrite, verify."""
