// Package store writes what devices report, their presence and their tool lists to SQLite or
// Postgres. It monitors the database for its parts: package ledger, which makes decisions and
// alone inserts and deletes rows of devices, presence and labels; and package records, which
// reads.
//
// # Writes
//
// Callers do not wait for writes. Rows are queued; one goroutine commits them in groups: up to
// GroupRows rows per table and about GroupBytes of tool lists, or the rows that arrive within
// Linger. Facts and presence are coalesced, one per device; history entries and catalogs are
// not. At most MaxHistoryQueue and MaxQueueBytes of these are queued; more are dropped and
// counted, and the caller gets an error. If the database refuses a group, the group is halved
// until only the faulty row is left; that row is logged, counted and dropped. While the
// database is unreachable, rows stay queued.
//
// A group is one transaction: it reads and locks its rows, decides what to change, updates
// them, and writes the differences of the fleet's counts. All transactions, including those of
// the ledger, lock rows in the same order: devices by id, presence by id, lists by hash, counts
// by key. Rows of unknown devices are ignored.
//
// Every group can be repeated, since the connection may break between a commit and its answer.
//
// # Durability
//
// A committed row survives the death of the process, and on SQLite (WAL, synchronous=FULL) a
// power failure. That costs an fsync for each group, and an eighth to a third of the rows per
// second. On Postgres the server's synchronous_commit decides.
//
// # Which write wins
//
// Facts: those that arrived earlier are ignored, in the queue and in the table. checked_at is by the database's clock, so
// that a node whose clock is wrong neither loses what devices report to it nor keeps others from replacing it; a stored time
// in the future is of such a node. Presence: a pair (epoch,
// seq) that is not above the stored one is ignored. last_seen of an online device is not
// updated: it is seen now. Indexed columns are only written when they change, because each of
// them multiplies the cost of the update.
//
// # Retention
//
// Prune deletes old history and unused lists. It may run on every node; one run per hour is
// made. Each list's row has the time of its last use (see pruneCatalogs): writers update it
// before they write an entry that refers to the list, and insert the list again if it was
// deleted.
//
// # Text
//
// Postgres refuses NUL and invalid UTF-8 in text. In plain columns U+FFFD replaces them, on both
// databases. A tool list is stored byte for byte: one that is not valid text is stored as
// base64, according to its encoding column.
package store
