"""Snapshots: list, tree, get, delete."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import UnsetType

from sandkeep.server import present
from sandkeep.server.app import RequestContext
from sandkeep.server.http import Reply, json_reply
from sandkeep.server.router import Table
from sandkeep.server.routes.common import REFUSALS, page_request
from sandkeep.states import SortOrder
from sandkeep.wire.objects import Pagination, TreeNode, tree_node
from sandkeep.wire.queries import ListSnapshotsQuery, SnapshotTreeQuery
from sandkeep.wire.responses import SnapshotPage, SnapshotShown, SnapshotTree

if TYPE_CHECKING:
    from sandkeep.engine.snapshots import Node

table = Table("snapshots")

_MOST_SIBLINGS = 20


@table.route(
    "GET",
    "/v2/sandboxes/snapshots",
    summary="List snapshots, of one sandbox or of all, deleted ones included",
    query=ListSnapshotsQuery,
    response=SnapshotPage,
    errors=(*REFUSALS, "not_found"),
)
async def list_snapshots(call: RequestContext) -> Reply:
    query = call.query(ListSnapshotsQuery)
    scope = call.scope()
    store = call.engine.store
    sandbox = store.sandboxes.get(scope.project, query.name).id if query.name else None
    page = store.snapshots.page(
        scope.project,
        page_request(query.limit, query.cursor, query.sort_order),
        sandbox=sandbox,
        orphaned=query.orphaned,
    )
    wanted = query.status
    rows = [row for row in page.items if isinstance(wanted, UnsetType) or row.status.value == wanted.value]
    return json_reply(
        SnapshotPage(
            snapshots=[present.snapshot(row) for row in rows],
            pagination=Pagination(count=len(rows), next=page.next),
        )
    )


@table.route(
    "GET",
    "/v2/sandboxes/snapshots/tree",
    summary="List the ancestors (newest first) or descendants (oldest first) of a snapshot",
    query=SnapshotTreeQuery,
    response=SnapshotTree,
    errors=(*REFUSALS, "not_found"),
)
async def snapshot_tree(call: RequestContext) -> Reply:
    query = call.query(SnapshotTreeQuery)
    scope = call.scope()
    tree = call.engine.snapshots.tree(
        scope.project,
        query.snapshot_id,
        descendants=query.sort_order is SortOrder.ASC,
        limit=query.limit,
    )
    return json_reply(
        SnapshotTree(
            snapshots=[_node(node) for node in tree.nodes],
            anchor=_node(tree.anchor),
            pagination=Pagination(count=len(tree.nodes), next=tree.next),
        )
    )


def _node(node: Node) -> TreeNode:
    shown = [present.snapshot(row) for row in node.siblings[:_MOST_SIBLINGS]]
    return tree_node(present.snapshot(node.snapshot), shown, more=len(node.siblings) > len(shown))


@table.route(
    "GET",
    "/v2/sandboxes/snapshots/{snapshot}",
    summary="Get a snapshot, or the record of a deleted one",
    response=SnapshotShown,
    errors=(*REFUSALS, "not_found"),
)
async def get_snapshot(call: RequestContext) -> Reply:
    scope, snapshot = call.snapshot()
    return json_reply(
        SnapshotShown(snapshot=present.snapshot(call.engine.snapshots.get(scope.project, snapshot)))
    )


@table.route(
    "DELETE",
    "/v2/sandboxes/snapshots/{snapshot}",
    summary="Delete a snapshot",
    response=SnapshotShown,
    errors=(*REFUSALS, "not_found"),
)
async def delete_snapshot(call: RequestContext) -> Reply:
    scope, snapshot = call.snapshot()
    row = await call.engine.snapshots.delete(scope.project, snapshot)
    return json_reply(SnapshotShown(snapshot=present.snapshot(row)))
