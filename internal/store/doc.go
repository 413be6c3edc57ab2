// Package store keeps devices, their presence, their tool lists and the
// exceptions of their credentials in SQL: SQLite or Postgres, with the same
// statements on both.
//
// # Writes
//
// Nobody waits for a write. Rows go to a queue; one goroutine commits them in
// groups: up to GroupRows rows per table and about GroupBytes of tool lists, or
// what came within Linger. Device rows, presence and exceptions are coalesced,
// one per device; history entries and catalogs never are. Of those at most
// MaxHistoryQueue and MaxQueueBytes wait; the rest is dropped, counted, and its
// caller learns of it. Inside a statement rows are sorted by key
// and unique, and tables are always written in the same order, so that two
// nodes cannot deadlock. A group that the database refuses is halved until the
// row at fault is alone; that one is logged, counted and dropped. While the
// database cannot be reached, rows wait.
//
// Every statement may be repeated without harm, since a connection can break
// between a commit and its answer.
//
// # Durability
//
// A row whose commit was reported survives the death of the process, and on
// SQLite (WAL, synchronous=FULL) a power cut: operators are answered once their
// decision is committed. Every group costs an fsync for it, which takes an
// eighth to a third of the rows per second. On Postgres the server's
// synchronous_commit decides.
//
// # Which write wins
//
// Devices: name, labels, preferred transport, and admission with the admitted
// client are decisions of a node or its operator. Each of these four has a time
// of its own (name_at and so on), and an older one never replaces a newer one.
// Board, firmware, ELF hash, chip, language, serial, activation version and
// checked_at are what the device reported at an OTA check, and an older checked_at
// never replaces a newer one. Which client waits comes with the later of both.
// first_seen only ever goes down. The same rules
// hold between two rows in the queue and between a row and the table.
//
// Presence: a pair (epoch, seq) that is not above the stored one changes
// nothing. Exceptions: the higher generation, then the later change.
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
