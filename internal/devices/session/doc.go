// Package session holds the devices that are connected to this node: one session for
// each, from the accepted connection to its end, with its MCP client, its tool list, the
// order of its calls, and its claims against other nodes. Front ends feed connections in
// with Hub.Accept; use cases find a device's Session and call it.
//
// Lock order: a shard of the table before an entry (entry.mu) before its session
// (Session.mu). Accept holds Hub.accepting for reading. None of them is held during I/O;
// Publisher, Directory and Records are called under a lock, since they only queue and
// never block. Anything that takes time is a task.
package session
