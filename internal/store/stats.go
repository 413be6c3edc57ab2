package store

import "sync/atomic"

// Stats are the store's counters and gauges since Open. They may be read at any time.
type Stats struct {
	// Rows changed, by table; presence rows that were older than the stored ones are in
	// StalePresence instead, and rows of unknown devices in UnknownDevices.
	DeviceRows, PresenceRows, HistoryRows atomic.Int64
	// CatalogWrites are tool lists stored for the first time; CatalogHits are history entries
	// whose list was stored already.
	CatalogWrites, CatalogHits atomic.Int64
	// StalePresence are presence rows that were ignored because the stored pair was not below
	// theirs.
	StalePresence, UnknownDevices atomic.Int64
	// Groups are committed transactions; Retries are transactions that failed without a faulty
	// row and were repeated.
	Groups, Retries atomic.Int64
	// DroppedHistory are entries beyond MaxHistoryQueue, DroppedBytes those beyond
	// MaxQueueBytes; BadRows are rows that the database refused; Late are rows saved after
	// Close.
	DroppedHistory, DroppedBytes, BadRows, Late atomic.Int64
	// PrunedHistory, PrunedCatalogs and PrunedAudit are rows that Prune deleted.
	PrunedHistory, PrunedCatalogs, PrunedAudit atomic.Int64
	// AuditBlocks are committed blocks of the audit log.
	AuditBlocks atomic.Int64
	// Rows that are queued or in flight, by table.
	DevicesWaiting, PresenceWaiting, HistoryWaiting atomic.Int64
	// QueueBytes are the bytes of history entries and tool lists that are queued or in flight,
	// at most MaxQueueBytes.
	QueueBytes atomic.Int64
}
