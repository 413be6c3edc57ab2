package store

import "sync/atomic"

// Stats are the store's counters and gauges since Open. Every field may be
// read at any time by anyone.
type Stats struct {
	// Rows changed, by table; a presence row that the fence refused is in
	// StalePresence instead, and one of a device that is not there in
	// UnknownDevices.
	DeviceRows, PresenceRows, HistoryRows atomic.Int64
	// CatalogWrites are tool lists stored for the first time; CatalogHits are
	// history entries whose list was stored already.
	CatalogWrites, CatalogHits atomic.Int64
	// StalePresence are presence rows that changed nothing, because the stored
	// pair was not below theirs.
	StalePresence, UnknownDevices atomic.Int64
	// Groups are transactions committed; Retries are those that failed through
	// no fault of a row and were tried again.
	Groups, Retries atomic.Int64
	// DroppedHistory are entries that came while MaxHistoryQueue waited,
	// DroppedBytes those for which MaxQueueBytes had no room; BadRows those that
	// the database refused; Late those saved after Close.
	DroppedHistory, DroppedBytes, BadRows, Late atomic.Int64
	// PrunedHistory, PrunedCatalogs and PrunedAudit are rows that Prune deleted.
	PrunedHistory, PrunedCatalogs, PrunedAudit atomic.Int64
	// AuditBlocks are blocks of the audit committed.
	AuditBlocks atomic.Int64
	// Rows that wait now or are on their way, by table.
	DevicesWaiting, PresenceWaiting, HistoryWaiting atomic.Int64
	// QueueBytes are the bytes of history entries and tool lists that wait or
	// are on their way, at most MaxQueueBytes.
	QueueBytes atomic.Int64
}
