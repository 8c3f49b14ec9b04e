"""The only room that imports deepspeed: engine, ZeRO optimizer, sharding, checkpoints, registration."""
