"""`sao-megatron submit`: what can be known before a job queues is checked before it queues."""
