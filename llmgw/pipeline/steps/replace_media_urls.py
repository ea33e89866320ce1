"""Replace media URLs: every remote image of the messages becomes a data URI, so that no worker fetches anything."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs

from llmgw.pipeline import params
from llmgw.pipeline.commands import Failed, Fetch, FetchLimits, Media
from llmgw.pipeline.context import Context, Entry
from llmgw.pipeline.media import MAX_URL, check_url, data_uri_type
from llmgw.pipeline.step import LegFailed, Work
from llmgw.pipeline.wire import Blob, image_parts, refuse, text_head, with_image_parts

MEGABYTE = 1 << 20


@attrs.frozen
class ReplaceMediaUrls:
    """Images by URL downloaded, under strict rules, and put into the request as data URIs."""

    api: ClassVar[int] = 1
    name: ClassVar[str] = "replace-media-urls"
    download_timeout: float = params.key(params.duration, "For one object, redirects included.", 10.0)
    max_concurrent_downloads: int = params.key(params.integer(1), "Downloads of one request at once.", 10)
    max_multimodal_entries: int = params.key(params.integer(0), "Most images a request; 0 = no limit.", 0)
    max_download_size: int = params.key(params.integer(1, 1 << 20), "Largest object, MB (2^20 bytes).", 10)
    allow_private_networks: bool = params.key(
        params.boolean, "Also 10/8, 172.16/12 and 192.168/16; nothing else.", False
    )
    allowed_domains: tuple[str, ...] = params.key(
        params.strings, "Host names that may be fetched from; none = any.", ()
    )

    def run(self, ctx: Context) -> Work:
        found: list[tuple[int, dict[str, Any], str]] = []  # index, part, URL (its head, where it is a long data URI)
        for index, part in image_parts(ctx.body):
            image = part.get("image_url")
            url = text_head(image.get("url"), MAX_URL + 1) if isinstance(image, dict) else None
            if url is not None:
                found.append((index, part, url))
        most = self.max_multimodal_entries
        if most and len(found) > most:
            raise refuse("bad_field", f"too many images: got {len(found)}, max {most}", "messages")
        entries = []
        remote: list[tuple[int, dict[str, Any], Entry, str]] = []
        for index, part, url in found:
            entry = Entry(index)
            entries.append(entry)
            if url.startswith("data:"):
                entry.content_type = data_uri_type(url)
            else:
                check_url(url, self.allowed_domains)
                remote.append((index, part, entry, url))
        if remote:
            limits = FetchLimits(
                timeout=self.download_timeout,
                at_once=self.max_concurrent_downloads,
                max_bytes=self.max_download_size * MEGABYTE,
                allow_private=self.allow_private_networks,
                domains=self.allowed_domains,
            )
            replies = yield Fetch(urls=tuple(url for *_, url in remote), limits=limits)
            assert isinstance(replies, tuple)
            change = {}
            for (index, part, entry, _), reply in zip(remote, replies, strict=True):
                if isinstance(reply, Failed):
                    if reply.reason == "cancelled":
                        continue  # the failure that cancelled it is in the list as well
                    if reply.reason == "bad_field":
                        raise refuse("bad_field", f"messages: image {index}: {reply.detail}", "messages")
                    raise LegFailed("replace-media-urls", reply)
                assert isinstance(reply, Media)
                entry.content_type = reply.content_type
                uri = Blob(f'"data:{reply.content_type};base64,{reply.base64}"'.encode())
                change[index] = {**part, "image_url": {**part["image_url"], "url": uri}}
            ctx.body = with_image_parts(ctx.body, change)
        ctx.entries = entries
        return None
