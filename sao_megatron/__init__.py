"""sao_megatron: asynchronous single-rollout RL for agentic MoE models.

Three kinds of process and two interfaces: a *controller* runs episodes on SGLang *engines* and appends
finished trajectories to a store; *learner* ranks (Megatron-Core) lease them, train, and publish weights.
"""
__version__ = "0.1.0"
