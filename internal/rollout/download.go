package rollout

import (
	"context"
	"crypto/subtle"
	"errors"
	"maps"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"fleetd/internal/access"
	"fleetd/internal/devices"
	"fleetd/internal/devices/catalog"
	"fleetd/internal/jobs"
)

const (
	// perAddress is how many of the places of downloads one address may take. A proxy that names no client may take all.
	perAddress = 8
	// perToken is how many downloads there may be of one offer at once.
	perToken = 2
	// placeTime is how long an offer keeps its place without a download on this node.
	placeTime = 2 * time.Minute

	statusTool = "self.get_device_status"
)

// asJob is as whom a gate calls a tool: what the rollout asks of a device is not the right of its owner.
var asJob = access.Principal{Caller: access.Admin, Via: access.ViaJob}

// ErrNoDownload is the error of a token that opens nothing, and ErrBusy of one with as many downloads as there may be.
var (
	ErrNoDownload = errors.New("the download does not exist, or has ended")
	ErrBusy       = errors.New("too many downloads of this address at once")
)

// Download is the image of an open offer.
type Download struct {
	File *os.File
	Size int64

	s      *Service
	task   jobs.Task
	token  string
	counts bool // the task moves on with it
	noted  time.Time
}

// Open opens the download of a token. Only the first of an offer, from the address of the check, moves the task on; others are served.
func (s *Service) Open(ctx context.Context, token string, address netip.Addr) (*Download, error) {
	device, job, ok := parseToken(token)
	if !ok {
		return nil, ErrNoDownload
	}
	if !s.places.enter(token) {
		return nil, ErrBusy
	}
	d := &Download{s: s, token: token}
	image := ""
	task, err := s.Store.Step(ctx, job, device, func(step *jobs.Step, ahead bool) error {
		r := step.Task.Rollout
		if !step.Runs() && !step.IsUnfetched() || r == nil || subtle.ConstantTimeCompare([]byte(r.Token), []byte(token)) != 1 {
			return ErrNoDownload
		}
		image, d.Size = step.Job.Spec.Action.Firmware.Image, r.Size
		d.counts = step.Fetch(addressText(address), ahead)
		return nil
	})
	if err == nil {
		d.task = task
		d.File, err = s.Images.File(ctx, image)
	}
	if err != nil {
		if d.counts {
			d.Close(err, false)
		} else {
			s.places.leave(token)
		}
		return nil, err
	}
	d.noted = time.Now()
	return d, nil
}

// Note notes how many bytes were sent so far; before the last ones it must be called with all but those.
func (d *Download) Note(sent int64) {
	if d.counts && time.Since(d.noted) >= jobs.NoteEvery {
		d.noted = time.Now()
		d.s.tasks.Run(func() {
			_, _ = d.s.step(0, d.task.Job, d.task.Device, func(step *jobs.Step) { // the next one says more
				if isSame(step.Task, &d.task) {
					step.Loaded(min(sent, d.Size-1))
				}
			})
		})
	}
}

// isSame reports whether a row is still at the offer that it was read with.
func isSame(row, t *jobs.Task) bool {
	return row.Fence == t.Fence && row.Rollout != nil && t.Rollout != nil && row.Rollout.Token == t.Rollout.Token && row.Rollout.Offers == t.Rollout.Offers
}

// Close ends the download: err is nil if the last byte was sent. stopping is whether the node ends it, so that it is neither a flash nor
// an offer.
func (d *Download) Close(err error, stopping bool) {
	if d.File != nil {
		_ = d.File.Close() // it was only read
	}
	d.s.places.leave(d.token)
	result := complete
	switch {
	case err != nil && stopping:
		result = cut
	case err != nil:
		result = broken
	}
	d.s.Downloads.Add(result, 1)
	if !d.counts {
		return
	}
	end := func() {
		_, _ = d.s.step(patience, d.task.Job, d.task.Device, func(step *jobs.Step) { // the periodic work finds a download that stands still
			switch {
			case !isSame(step.Task, &d.task):
			case result == complete:
				step.Loaded(d.Size)
			case result == cut:
				step.Cut()
			default:
				step.Break()
			}
		})
	}
	if result == complete {
		end() // before the device can restart and check
		return
	}
	if !d.s.tasks.Run(end) {
		end()
	}
}

// Busy returns the firmware task that keeps a device from answering calls, if there is one.
func (s *Service) Busy(ctx context.Context, id devices.ID, connected bool) *devices.Error {
	if !s.Active() || connected && !s.called.has(id) {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, checkTime)
	defer cancel()
	queue, err := s.Store.Rolling(ctx, id)
	if err != nil || len(queue) == 0 {
		return nil
	}
	switch t := &queue[0].Task; t.Phase {
	case jobs.PhaseCalled, jobs.PhaseOffered, jobs.PhaseLoading, jobs.PhaseBooting:
		return devices.Errorf(devices.CodeDeviceBusy, "job %s is giving device %s a firmware image (%s); repeat the call when the device is back", t.Job, id, t.Phase)
	}
	return nil
}

// called are the devices of this node that were told to restart and have not gone yet.
type called struct {
	mu    sync.Mutex
	until map[devices.ID]time.Time
}

func (c *called) add(id devices.ID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.until == nil {
		c.until = map[devices.ID]time.Time{}
	}
	c.until[id] = time.Now().Add(jobs.CalledTime)
}

func (c *called) remove(id devices.ID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.until, id)
}

// has forgets those whose time has passed.
func (c *called) has(id devices.ID) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	maps.DeleteFunc(c.until, func(_ devices.ID, until time.Time) bool { return until.Before(now) })
	return !c.until[id].IsZero()
}

// places are the offers and downloads of a node.
type places struct {
	limit int

	mu   sync.Mutex
	list map[string]*place // by token
}

type place struct {
	from    string
	until   time.Time // without a download
	loading int
}

// take takes a place for an offer.
func (p *places) take(token, from string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if at := p.list[token]; at != nil { // the same offer again
		at.until = time.Now().Add(placeTime)
		return true
	}
	if !p.freeLocked(from) {
		return false
	}
	p.list[token] = &place{from: from, until: time.Now().Add(placeTime)}
	return true
}

// free reports whether there is a place for another offer to an address.
func (p *places) free(from string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.freeLocked(from)
}

func (p *places) freeLocked(from string) bool {
	now, same := time.Now(), 0
	for token, at := range p.list {
		if at.loading == 0 && at.until.Before(now) {
			delete(p.list, token)
		} else if at.from == from {
			same++
		}
	}
	return len(p.list) < p.limit && (from == "" || same < perAddress)
}

// release gives the place of an offer back that was not made.
func (p *places) release(token string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.list, token)
}

// enter begins a download: one whose offer another node made has no place here, and gets one whatever the limit is.
func (p *places) enter(token string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	at := p.list[token]
	if at == nil {
		at = &place{}
		p.list[token] = at
	}
	if at.loading >= perToken {
		return false
	}
	at.loading++
	return true
}

// loading returns how many downloads there are.
func (p *places) loading() (n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, at := range p.list {
		n += at.loading
	}
	return n
}

// leave ends a download.
func (p *places) leave(token string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if at := p.list[token]; at != nil {
		if at.loading--; at.loading <= 0 {
			delete(p.list, token)
		}
	}
}

// missingTools returns the tools of before that after lacks, but for some.
func missingTools(before, after *catalog.Catalog, but []string) (missing []string) {
	for i := range before.Tools {
		if name := before.Tools[i].Name; after.Tool(name) == nil && !slices.Contains(but, name) {
			missing = append(missing, name)
		}
	}
	return missing
}
