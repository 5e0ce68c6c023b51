"""A process of each node that takes cached steps to the durable level, and outlives the trainer.

hand over: order -> cache's flush folder -> daemon: chosen, copied, marked -> all nodes marked: published
journal <- every durable file, every outcome; read by trainers and by `penstock checkpoint status`
"""
