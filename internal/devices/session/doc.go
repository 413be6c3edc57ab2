// Package session has the devices that are connected to this node: one session for
// each, from the connection that was accepted to its end, with its MCP client, its
// tool list, its calls one after the other, and its place among the claims of other
// nodes. Front ends feed connections in by Hub.Accept; use cases find a device's
// Session and use it.
//
// Lock order: a shard of the table before an entry (entry.mu) before its session
// (Session.mu). Hub.accepting is held for reading around an Accept. None of them is
// held during I/O, but that a Publisher, a Directory and Records take what they
// queue; these never block. What takes time is a task.
package session
