"""The engine: an SGLang server. `cpu` starts one without a GPU, `process` runs one, `client` speaks to one."""
