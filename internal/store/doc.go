// Package store keeps what devices report, their presence and their tool lists in
// SQL: SQLite or Postgres. It watches the database for its parts: the ledger, by
// which devices are made, decided about and forgotten, and which alone inserts and
// deletes rows of devices, presence and labels; and records, which reads.
//
// # Writes
//
// Nobody waits for a write. Rows go to a queue; one goroutine commits them in
// groups: up to GroupRows rows per table and about GroupBytes of tool lists, or
// what came within Linger. Facts and presence are coalesced, one per device;
// history entries and catalogs never are. Of those at most MaxHistoryQueue and
// MaxQueueBytes wait; the rest is dropped, counted, and its caller learns of it. A
// group that the database refuses is halved until the row at fault is alone; that
// one is logged, counted and dropped. While the database cannot be reached, rows
// wait.
//
// A group is one transaction: it reads and locks the rows that it is about,
// decides what becomes of them, updates those, and writes by how much the counts
// of the fleet change. Rows are locked in the order of all transactions, those of
// the ledger included: devices by id, presence by id, lists by hash, counts by
// their key. What comes for a device that is not there (any more) changes nothing.
//
// Every group may be repeated without harm, since a connection can break between a
// commit and its answer.
//
// # Durability
//
// A row whose commit was reported survives the death of the process, and on
// SQLite (WAL, synchronous=FULL) a power cut. Every group costs an fsync for it,
// which takes an eighth to a third of the rows per second. On Postgres the
// server's synchronous_commit decides.
//
// # Which write wins
//
// Facts: an older checked_at changes nothing, in the queue and in the table.
// Presence: a pair (epoch, seq) that is not above the stored one changes nothing.
// last_seen of a device that is online is not kept up to date: it is seen now.
// Indexed columns are only written when they change, because each of them makes
// the update several times as dear.
//
// # Retention
//
// Prune deletes old history and lists that nothing names. It may run on every
// node; one an hour gets the turn. Each list's row says when it was last used
// (see pruneCatalogs for why): writers renew that before they write an entry
// that names it, and insert the list again if it is gone.
//
// # Text
//
// Postgres refuses NUL and invalid UTF-8 in text. U+FFFD takes their place in
// plain columns, on both databases. A tool list is kept to the byte: one that
// is not valid text is stored as base64 and says so in its encoding column.
package store
