"""A real SGLang server behind the engine contract: reply parser, HTTP client, server process, engine, diagnosis."""
