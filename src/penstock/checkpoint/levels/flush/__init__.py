"""From the caches to the durable level: by threads of the trainer, or by a daemon that outlives it.

Trainers, daemons and the daemons of other nodes meet in files and nowhere else: orders, a journal, marks on
the durable level. So any of them may be killed at any time, and its successor reads on where it stopped.

    trainer: order -> the cache's flush folder -> daemon: chosen, copied, marked -> all nodes done: published
    daemon:  journal of every durable file and outcome -> trainers, `penstock checkpoint status`
"""
