"""Prompts with images: equal token ids, but another image is another prompt from its place on."""
from __future__ import annotations

import os
from typing import Any

from context import Context, Prompt, Store, difference, must_equal
from harness import HERE, Answer, Engine, Failed
from models import IMAGE_TOKEN
from promises import promise
from test_shared import must_find, must_miss


STUBS = os.pathsep.join([str(HERE), str(HERE / "stubs"), *filter(None, [os.environ.get("PYTHONPATH")])])


def start(context: Context, store: Store | None = None, **options: Any) -> Engine:
    return context.engine("llava", store, environment=dict(PYTHONPATH=STUBS), **options)


def ask(engine: Engine, prompts: list[Prompt], image: int) -> list[Answer]:
    return engine.run([dict(ids=p, max_tokens=16, image=image) for p in prompts])


def check(context: Context, **extra: Any) -> None:
    def seen(at: int) -> Prompt:
        return context.prompt(at) + [IMAGE_TOKEN] + context.prompt(context.random.randint(200, 400))
    early, late = [seen(10) for _ in range(3)], [seen(70) for _ in range(3)]
    plain = start(context, enable_prefix_caching=False)
    expected = {image: ask(plain, early + late, image) for image in (1, 2)}
    plain.kill()
    if (d := difference(expected[1], expected[2])).tokens < d.requests:
        raise Failed("an image changes too little: the test proves nothing")

    store = context.store()
    engine = start(context, store, extra=extra)
    must_equal("the first image", expected[1], ask(engine, early + late, 1))
    store.settle()
    engine.reset()
    answers = ask(engine, early + late, 2)
    must_miss("another image in the first block", answers[:len(early)])
    if any(a.cached != 64 for a in answers[len(early):]):
        raise Failed(f"two blocks before the image are the same, {[a.cached for a in answers[len(early):]]} tokens were used")
    must_equal("the second image", expected[2], answers)
    store.settle()
    engine.kill()
    engine = start(context, store, extra=extra)
    engine.generate(context.prompts(2, 40, 60), 2, together=False)
    for image in (1, 2):
        answers = ask(engine, early + late, image)
        must_find(f"image {image} after a restart", answers)
        must_equal(f"image {image} after a restart", expected[image], answers)
        if any((a.cached or 0) <= 96 for a in answers):
            raise Failed(f"image {image} after a restart: {[a.cached for a in answers]} tokens were used, none behind the image")
    engine.stop()
    store.must_be_clean("the engine has gone")


@promise(daemon=True, short=False)
def other_images_share_only_what_comes_before_them(context: Context) -> None:
    """a small LLaVA: equal token ids, two images; the engine's block hashes"""
    check(context)


@promise(daemon=True, short=False)
def other_images_share_nothing_more_under_own_keys(context: Context) -> None:
    """the same with kvd's own keys: the images' hashes are extra keys of ours"""
    check(context, hash="own")
