package registry

import (
	"container/list"
	"context"
	"sync"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/timescale"
)

// RowLimit is how long what needs a row waits for it.
var RowLimit = timescale.Patience(250 * time.Millisecond)

const (
	// rowPage is how many rows are asked for with one statement.
	rowPage = 500
	// rowsMemory bounds the rows kept of devices that are not connected, in bytes.
	rowsMemory = 16 << 20
	// rowRetry is the pause before rows are asked for again that a session waits for.
	rowRetry = time.Second
)

// rows asks the database for rows, in groups, and keeps what is decided of
// devices that were asked about. While a group is on its way the next one gathers.
type rows struct {
	r    *Registry
	wake chan struct{}

	mu      sync.Mutex
	waiting map[devices.ID]*rowWait
	cache   map[devices.ID]*list.Element // of *cached, guarded by Registry.follow
	order   *list.List                   // the latest used first
	bytes   int
}

// rowWait is a row that was asked for.
type rowWait struct {
	done    chan struct{}
	member  devices.Member
	err     error
	deliver bool // to the observer, when it is there, however long that takes
}

// cached is what is decided of a device, kept up to date with each change.
type cached struct {
	member devices.Member
	bytes  int
}

func (w *rows) init(r *Registry) {
	w.r, w.wake = r, make(chan struct{}, 1)
	w.waiting, w.cache, w.order = map[devices.ID]*rowWait{}, map[devices.ID]*list.Element{}, list.New()
}

// Request has the row of a device read and handed to the observer. It does not
// wait; while the database is away it is tried again.
func (r *Registry) Request(id devices.ID) { r.rows.ask(id, true) }

// Decided returns what is decided of a device: from memory, else from the
// database, for which it waits at most RowLimit. It fails with
// devices.CodeDeviceUnknown or CodeUnavailable.
func (r *Registry) Decided(ctx context.Context, id devices.ID) (devices.Member, error) {
	if m, ok := r.rows.get(id); ok {
		return m, nil
	}
	if r.ready.Load() && !r.Standing(id, "").Known {
		return devices.Member{}, Unknown(id)
	}
	wait := r.rows.ask(id, false)
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
	return &devices.Error{Code: devices.CodeUnavailable, Part: "database", Detail: "what is decided of " + string(id) + " (its labels) cannot be read from the database now; try again"}
}

func (w *rows) get(id devices.ID) (devices.Member, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	e := w.cache[id]
	if e == nil {
		return devices.Member{}, false
	}
	w.order.MoveToFront(e)
	return e.Value.(*cached).member, true
}

func (w *rows) ask(id devices.ID, deliver bool) *rowWait {
	w.mu.Lock()
	defer w.mu.Unlock()
	wait := w.waiting[id]
	if wait == nil {
		wait = &rowWait{done: make(chan struct{})}
		w.waiting[id] = wait
		select {
		case w.wake <- struct{}{}:
		default:
		}
	}
	wait.deliver = wait.deliver || deliver
	return wait
}

// run reads what was asked for.
func (w *rows) run() {
	for {
		select {
		case <-w.r.ctx.Done():
			return
		case <-w.wake:
		}
		for page := w.take(); len(page) > 0; page = w.take() {
			if !w.read(page) {
				select {
				case <-w.r.ctx.Done():
					return
				case <-time.After(rowRetry):
				}
			}
		}
	}
}

func (w *rows) take() map[devices.ID]*rowWait {
	w.mu.Lock()
	defer w.mu.Unlock()
	page := make(map[devices.ID]*rowWait, min(len(w.waiting), rowPage))
	for id, wait := range w.waiting {
		if len(page) == rowPage {
			break
		}
		page[id] = wait
		delete(w.waiting, id)
	}
	return page
}

// read gets one page of rows; false if the database does not answer. What is to
// be delivered is then asked for again.
func (w *rows) read(page map[devices.ID]*rowWait) bool {
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
				w.ask(id, true)
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
		if !w.upToDate(&row.Device, from) {
			w.ask(row.Device.ID, wait.deliver)
			wait.err = noRow(row.Device.ID)
			close(wait.done)
			continue
		}
		wait.member = row.Device.Member()
		w.keep(wait.member, !wait.deliver) // else the observer has it, for as long as the device is connected
		close(wait.done)
		if wait.deliver {
			w.r.opt.Observer.Row(row)
		}
	}
	for id, wait := range page {
		wait.err = Unknown(id)
		close(wait.done)
		if wait.deliver { // the row is on its way, or nobody's
			w.r.opt.Observer.Row(devices.Row{Device: devices.Device{ID: id}})
		}
	}
	return true
}

// upToDate folds the changes into a row that came into force while it was read;
// false if there are more of them than a node keeps. Registry.follow is held.
func (w *rows) upToDate(d *devices.Device, from int64) bool {
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

// keep adds to the cache what is decided of a device, or takes it out. Registry.follow
// is held.
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
	w.cache[m.ID] = w.order.PushFront(&cached{m, size})
	for w.bytes += size; w.bytes > rowsMemory; {
		w.dropLocked(w.order.Back().Value.(*cached).member.ID)
	}
}

func (w *rows) dropLocked(id devices.ID) {
	if e := w.cache[id]; e != nil {
		w.bytes -= e.Value.(*cached).bytes
		w.order.Remove(e)
		delete(w.cache, id)
	}
}

// fold brings what is kept of a device up to date. Registry.follow is held.
func (w *rows) fold(c devices.Change) {
	w.mu.Lock()
	e := w.cache[c.Device]
	w.mu.Unlock()
	if e == nil || c.Device == "" {
		return
	}
	m := e.Value.(*cached).member
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
