"""How a process comes to have a plan in force: `apply()`, the launcher's bootstrap, vLLM's plugin."""
