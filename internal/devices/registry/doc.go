// Package registry holds the members of the fleet: their admission, their credentials,
// and all decisions about them. Decisions are changes in a log in the database. Every
// node applies the log in order of revision and keeps a compact roster of all members in
// memory, so that devices can check in and connect while the database is unreachable.
//
// Lock order: Registry.follow (which applies changes) before Registry.mu (exceptions,
// pending revocations) before a shard of the roster. Only follow, which orders the reads
// of the log, is held during I/O.
package registry
