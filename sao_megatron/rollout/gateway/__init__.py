"""The gateway: OpenAI's chat completions for agents that own their loop, recorded as token-exact trajectories."""
