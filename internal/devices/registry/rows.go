package registry

import (
	"container/list"
	"context"
	"sync"
	"time"

	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/tasks"
	"fleetd/internal/timescale"
)

// RowLimit is how long callers wait for a row.
var RowLimit = timescale.Patience(250 * time.Millisecond)

const (
	// rowPage is how many rows one statement reads.
	rowPage = 500
	// rowsMemory limits the cache of devices that are not connected, in bytes.
	rowsMemory = 16 << 20
	// rowRetry is the pause before the rows of connected devices are requested again.
	rowRetry = time.Second
)

// rows reads rows from the database in groups, and caches the state of devices that were
// requested. While one group is read the next one is collected.
type rows struct {
	r    *Registry
	wake chan struct{}

	mu      sync.Mutex
	waiting map[devices.ID]*rowRequest
	cache   map[devices.ID]*list.Element // of *cached, guarded by Registry.follow
	order   *list.List                   // the latest used first
	bytes   int
}

// rowRequest is a requested row.
type rowRequest struct {
	done    chan struct{}
	member  devices.Member
	err     error
	deliver bool // pass it to the observer when it arrives, however late
}

// cachedMember is the state of a device, updated with each change.
type cachedMember struct {
	member devices.Member
	bytes  int
}

func (w *rows) init(r *Registry) {
	w.r, w.wake = r, make(chan struct{}, 1)
	w.waiting, w.cache, w.order = map[devices.ID]*rowRequest{}, map[devices.ID]*list.Element{}, list.New()
}

// RequestRow requests the row of a device for the observer. It does not block; while the
// database is unreachable the request is retried.
func (r *Registry) RequestRow(id devices.ID) { r.rows.request(id, true) }

// Member returns the state of a device: from memory, else from the database, for which it
// waits at most RowLimit. The error has devices.CodeDeviceUnknown or CodeUnavailable.
func (r *Registry) Member(ctx context.Context, id devices.ID) (devices.Member, error) {
	if m, ok := r.rows.get(id); ok {
		return m, nil
	}
	if r.ready.Load() && !r.Status(id, "").Known {
		return devices.Member{}, UnknownDevice(id)
	}
	wait := r.rows.request(id, false)
	ctx, cancel := context.WithTimeout(ctx, RowLimit)
	defer cancel()
	select {
	case <-wait.done:
		return wait.member, wait.err
	case <-ctx.Done():
		return devices.Member{}, noRow(id)
	}
}

func noRow(id devices.ID) error {
	return &devices.Error{Code: devices.CodeUnavailable, Part: "database", Detail: "the labels of " + string(id) + " cannot be read from the database now; try again"}
}

func (w *rows) get(id devices.ID) (devices.Member, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	e := w.cache[id]
	if e == nil {
		return devices.Member{}, false
	}
	w.order.MoveToFront(e)
	return e.Value.(*cachedMember).member, true
}

func (w *rows) request(id devices.ID, deliver bool) *rowRequest {
	w.mu.Lock()
	defer w.mu.Unlock()
	wait := w.waiting[id]
	if wait == nil {
		wait = &rowRequest{done: make(chan struct{})}
		w.waiting[id] = wait
		tasks.Signal(w.wake)
	}
	wait.deliver = wait.deliver || deliver
	return wait
}

// run reads the requested rows.
func (w *rows) run() {
	for {
		select {
		case <-w.r.ctx.Done():
			return
		case <-w.wake:
		}
		for page := w.nextPage(); len(page) > 0; page = w.nextPage() {
			if !w.read(page) {
				if !clock.Sleep(w.r.ctx, rowRetry) {
					return
				}
			}
		}
	}
}

func (w *rows) nextPage() map[devices.ID]*rowRequest {
	w.mu.Lock()
	defer w.mu.Unlock()
	page := make(map[devices.ID]*rowRequest, min(len(w.waiting), rowPage))
	for id, wait := range w.waiting {
		if len(page) == rowPage {
			break
		}
		page[id] = wait
		delete(w.waiting, id)
	}
	return page
}

// read reads one page of rows. It reports false if the database does not answer; rows for
// the observer are then requested again.
func (w *rows) read(page map[devices.ID]*rowRequest) bool {
	ids := make([]devices.ID, 0, len(page))
	for id := range page {
		ids = append(ids, id)
	}
	from := w.r.Position().Revision
	ctx, cancel := context.WithTimeout(w.r.ctx, decideLimit)
	found, err := w.r.opt.Records.Rows(ctx, ids)
	cancel()
	if err != nil {
		for id, wait := range page {
			wait.err = noRow(id)
			close(wait.done)
			if wait.deliver && w.r.ctx.Err() == nil {
				w.request(id, true)
			}
		}
		return false
	}
	w.r.follow.Lock()
	defer w.r.follow.Unlock()
	for _, row := range found {
		wait := page[row.Device.ID]
		if wait == nil {
			continue
		}
		delete(page, row.Device.ID)
		if !w.foldRecent(&row.Device, from) {
			w.request(row.Device.ID, wait.deliver)
			wait.err = noRow(row.Device.ID)
			close(wait.done)
			continue
		}
		wait.member = row.Device.Member()
		w.keep(wait.member, !wait.deliver) // else the observer keeps it while the device is connected
		close(wait.done)
		if wait.deliver {
			w.r.opt.Observer.OnRow(row)
		}
	}
	for id, wait := range page {
		wait.err = UnknownDevice(id)
		close(wait.done)
		if wait.deliver { // the row is not written yet, or the device is unknown
			w.r.opt.Observer.OnRow(devices.Row{Device: devices.Device{ID: id}})
		}
	}
	return true
}

// foldRecent folds the changes into a row that came into force while it was read. It
// reports false if they are no longer in memory. The caller holds Registry.follow.
func (w *rows) foldRecent(d *devices.Device, from int64) bool {
	since := w.r.recent.list
	if at := w.r.at.Revision; at > from && (len(since) == 0 || since[0].Revision > from+1) {
		return false
	}
	for _, c := range since {
		if c.Revision > from && c.Device == d.ID {
			d.Fold(c)
		}
	}
	return true
}

// keep adds the state of a device to the cache, or removes it. The caller holds
// Registry.follow.
func (w *rows) keep(m devices.Member, here bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.dropLocked(m.ID)
	if !here {
		return
	}
	size := 300 + 2*len(m.ID) + len(m.ClientID) + len(m.Name)
	for key, value := range m.Labels {
		size += 64 + len(key) + len(value)
	}
	w.cache[m.ID] = w.order.PushFront(&cachedMember{m, size})
	for w.bytes += size; w.bytes > rowsMemory; {
		w.dropLocked(w.order.Back().Value.(*cachedMember).member.ID)
	}
}

func (w *rows) dropLocked(id devices.ID) {
	if e := w.cache[id]; e != nil {
		w.bytes -= e.Value.(*cachedMember).bytes
		w.order.Remove(e)
		delete(w.cache, id)
	}
}

// fold updates the cached state of a device. The caller holds Registry.follow.
func (w *rows) fold(c devices.Change) {
	w.mu.Lock()
	e := w.cache[c.Device]
	w.mu.Unlock()
	if e == nil || c.Device == "" {
		return
	}
	m := e.Value.(*cachedMember).member
	if c.Revision <= m.Revision {
		return
	}
	if err := m.Fold(c); err != nil || !m.Known() {
		w.mu.Lock()
		w.dropLocked(c.Device)
		w.mu.Unlock()
		return
	}
	w.keep(m, true)
}

func (w *rows) clear() {
	w.mu.Lock()
	defer w.mu.Unlock()
	clear(w.cache)
	w.order.Init()
	w.bytes = 0
}
