// Package registry knows who the devices of the fleet are: who is a member, with
// which credentials, and what was decided of each. Decisions are changes in a log
// that the database keeps; every node follows it by revision and holds a compact
// roster of all members, so that a device can boot and connect while the database
// is away.
//
// Lock order: Registry.follow (the one that applies changes) before Registry.mu
// (exceptions, pending revocations) before a shard of the roster. None is held
// during I/O, follow excepted, which orders the reads of the log.
package registry
