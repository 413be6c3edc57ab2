package session

import (
	"context"
	"time"

	"fleetd/internal/devices"
)

// Directory announces this node's devices to other nodes.
type Directory interface {
	// Hold announces the device; its calls are then routed to this node.
	Hold(id devices.ID) error
	// Release ends the announcement. Calls of Hold and Release for one device are
	// counted, since they may overlap.
	Release(id devices.ID)
	// Claim sends a claim to every other node, which handles it with OnClaim. It never
	// blocks; a lost claim is repeated within a minute.
	Claim(c devices.Claim)
	// Remind is Claim, but only for other holders of the device.
	Remind(c devices.Claim)
	// PublishNews sends news to every other node, which handles it with OnNews. It never
	// blocks, and news may be lost: a device repeats its check-in.
	PublishNews(n devices.News)
}

// Vision creates the upload addresses of photos.
type Vision interface {
	// Grant returns the URL and bearer token for `initialize`, and when the token expires.
	// An empty URL means that photos are disabled.
	Grant(id devices.ID, now time.Time) (url, token string, expires time.Time)
	// Snapshot returns a URL for one upload of the device, and the id of its photo.
	Snapshot(id devices.ID, now time.Time) (url, photo string)
}

// Conn is one transport connection to one device. It is safe for concurrent use.
type Conn interface {
	// SendControl writes or queues one envelope within a limited time, and does not keep
	// msg. ErrOverloaded means that the queue is full; the session is then closed as slow.
	// With any error, no byte of msg reaches the device.
	SendControl(msg []byte) error
	// Close closes the connection for this reason. It may be called repeatedly and
	// concurrently. It unblocks the reader and does not wait for it.
	Close(reason devices.CloseReason)
}

// Catalogs stores tool lists by content, and their history.
type Catalogs interface {
	// Catalog returns one stored list, or ErrNotFound.
	Catalog(ctx context.Context, h devices.Hash) (devices.CatalogText, error)
	// History returns the entries of one device, newest first, at most limit, older than
	// (epoch, seq) unless that is zero.
	History(ctx context.Context, id devices.ID, epoch devices.Epoch, seq int64, limit int) ([]devices.HistoryEntry, error)
	// SaveCatalog queues a history entry with the text of its catalog (text may be shared
	// and must not change; its Tools may be nil if the catalog is stored already), and
	// calls committed after both were committed. Entries are never coalesced. committed
	// runs on the writer's goroutine and must not block; it is not called if the node
	// stops first. queued is false if the queue is full and the entry is dropped.
	SaveCatalog(e devices.HistoryEntry, text devices.CatalogText, committed func()) (queued bool)
	// KeepCatalog records that a device has this list, without an entry: the list is not
	// deleted because of its age, and is stored again if it was. Call it whenever a
	// device's list was read; it is cheap.
	KeepCatalog(text devices.CatalogText)
}

// Publisher publishes events. Publish never blocks; dropped events are counted by the
// publisher.
type Publisher interface {
	Publish(e devices.Event)
}

// Records reads devices, and writes the state of sessions.
type Records interface {
	// Find returns one device, or ErrNotFound.
	Find(ctx context.Context, id devices.ID) (devices.Row, error)
	// SaveFacts queues what a device reported at an OTA check; a later check replaces one
	// that is still queued.
	SaveFacts(f devices.Check)
	// SavePresence queues the row; it is written only if (Epoch, Seq) is above the stored
	// pair.
	SavePresence(p devices.Presence)
}
