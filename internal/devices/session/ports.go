package session

import (
	"context"
	"time"

	"fleetd/internal/devices"
)

// Directory tells the other nodes which devices this node holds.
type Directory interface {
	// Hold announces the device; calls for it now arrive at this node.
	Hold(id devices.ID) error
	// Release takes the announcement back. Hold and Release of one device may
	// overlap; they are counted, not toggled.
	Release(id devices.ID)
	// Claim tells every other node, which answer through Service.Claimed. It
	// never blocks; a claim that cannot be sent is made again within a minute.
	Claim(c devices.Claim)
	// Remind is Claim to whoever else holds the device, and to nobody else.
	Remind(c devices.Claim)
	// Tell passes news on to every other node, which take them by
	// Service.Learn. It never blocks, and they may be lost: a device repeats its
	// check.
	Tell(n devices.News)
}

// Vision grants devices the right to upload photos.
type Vision interface {
	// Grant returns the URL and bearer token for `initialize`, and when the
	// token expires. An empty URL means photos are not offered.
	Grant(id devices.ID, now time.Time) (url, token string, expires time.Time)
	// Snapshot returns a URL that takes one upload of the device, and the id
	// its photo will have.
	Snapshot(id devices.ID, now time.Time) (url, photo string)
}

// Conn is one live transport connection to one device. Implementations accept
// calls from any goroutine.
type Conn interface {
	// SendControl writes one envelope, or queues it behind others, within a
	// bounded time, and does not keep msg. ErrOverloaded means that too much
	// waits already; the session is then closed as slow. Any error means that
	// no byte of msg reaches the device.
	SendControl(msg []byte) error
	// Close ends the connection for this reason; any number of times, by
	// anyone. It unblocks the reader and does not wait for it.
	Close(reason devices.CloseReason)
}

// Catalogs keeps tool lists by content, and who had which when.
type Catalogs interface {
	// Catalog returns one stored list, or ErrNotFound.
	Catalog(ctx context.Context, h devices.Hash) (devices.CatalogText, error)
	// History returns the entries of one device, newest first, at most limit,
	// older than the pair (epoch, seq) unless that is zero.
	History(ctx context.Context, id devices.ID, epoch devices.Epoch, seq int64, limit int) ([]devices.HistoryEntry, error)
	// SaveCatalog queues a history entry with the text of its catalog (text may
	// be shared and must not change; its Tools may be nil if the catalog is
	// known to be stored) and calls committed once both are in the database.
	// Entries are never coalesced. committed runs on the writer's goroutine and
	// must not block; it is not called if the node stops first. queued is false
	// if the entry is dropped, because as much as may already waits.
	SaveCatalog(e devices.HistoryEntry, text devices.CatalogText, committed func()) (queued bool)
	// KeepCatalog says that a device has this list, of which no entry has to be
	// made: it must not be deleted for its age, and is stored again if it was.
	// It is cheap enough to be called whenever a device's list was read.
	KeepCatalog(text devices.CatalogText)
}

// Publisher takes events for the outside. Publish never blocks; an event that
// cannot be taken is counted by the publisher and dropped.
type Publisher interface {
	Publish(e devices.Event)
}

// Records reads devices, and writes what sessions know of them.
type Records interface {
	// Find returns one device, or ErrNotFound.
	Find(ctx context.Context, id devices.ID) (devices.Row, error)
	// SaveFacts queues what a device reported at an OTA check; the latest check of
	// a device replaces one that still waits.
	SaveFacts(f devices.Facts)
	// SavePresence queues the row; it is written only if (Epoch, Seq) is above
	// the stored pair.
	SavePresence(p devices.Presence)
}
