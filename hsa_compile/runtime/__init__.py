"""What lives beside a compiled graph: page summaries bound to caches, growing buffers, counters."""
