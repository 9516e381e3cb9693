"""The lock that sampler and trainer share: in turns, again by who has it, and never lost."""

import _thread
import threading
import time
from itertools import pairwise

import pytest
import torch

from rllm.backends.local.device_turn import FairLock, device_turn
from rllm.backends.local.model import Decoder, DecoderConfig


def test_it_goes_to_who_has_waited_longest():
    lock, order = FairLock(), []
    stop = threading.Event()

    def greedy():  # as the sampler does: takes it again at once
        while not stop.is_set():
            with lock:
                order.append("sampler")
                time.sleep(0.001)

    thread = threading.Thread(target=greedy)
    thread.start()
    while not order:
        time.sleep(0.001)
    for _ in range(20):
        with lock:
            order.append("trainer")
    stop.set()
    thread.join()
    places = [i for i, who in enumerate(order) if who == "trainer"]
    # By right 2; a busy machine may be late to ask again.
    assert all(b - a <= 10 for a, b in pairwise(places)), order
    lock.__enter__()
    waiting = []
    for name in "abc":
        threading.Thread(target=lambda name=name: [lock.__enter__(), waiting.append(name), lock.__exit__()]).start()
        while len(lock._waiting) < "abc".index(name) + 1:
            time.sleep(0.001)
    lock.__exit__()
    while len(waiting) < 3:
        time.sleep(0.001)
    assert waiting == ["a", "b", "c"]


def test_who_has_it_may_take_it_again_and_an_error_gives_it_back():
    lock, entered = FairLock(), threading.Event()

    def other():
        with lock:
            entered.set()

    with pytest.raises(ValueError), lock:
        with lock:
            pass
        thread = threading.Thread(target=other)
        thread.start()
        assert not entered.wait(0.05)
        raise ValueError
    assert entered.wait(5)
    thread.join()
    with lock:
        pass


def test_no_two_have_it_at_once():
    lock, inside, most, total = FairLock(), 0, 0, 0

    def work():
        nonlocal inside, most, total
        for _ in range(500):
            with lock:
                inside += 1
                most = max(most, inside)
                total += 1
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most, total, inside) == (1, 3000, 0)


def test_an_interrupt_while_waiting_leaves_it_to_the_others():
    lock, held, go = FairLock(), threading.Event(), threading.Event()

    def holder():
        with lock:
            held.set()
            go.wait(10)

    thread = threading.Thread(target=holder)
    thread.start()
    held.wait(5)
    threading.Timer(0.1, _thread.interrupt_main).start()
    threading.Timer(0.3, go.set).start()  # a wait in the main thread may hear of it only when it ends
    with pytest.raises(KeyboardInterrupt):
        with lock:
            time.sleep(1)
        time.sleep(1)
    go.set()
    thread.join()
    taken = threading.Thread(target=lambda: [lock.__enter__(), lock.__exit__()])
    taken.start()
    taken.join(5)
    assert not taken.is_alive() and not lock._waiting


def test_there_is_nothing_to_hold_where_no_pass_is_captured():
    config = DecoderConfig(50, 32, 1, 2, 1, 16, 64, 1e-6, 64, True, False, False)
    model = Decoder(config, 1.0 / 10000 ** (torch.arange(0, 16, 2).float() / 16))
    assert not model.fused
    with device_turn(model):
        other = threading.Thread(target=lambda: device_turn(model).__enter__())
        other.start()
        other.join(5)
        assert not other.is_alive()
