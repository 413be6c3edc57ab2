package admission

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"math/big"
	"net/netip"
	"slices"
	"sync"
	"time"

	"fleetd/internal/devices"
	"fleetd/internal/devices/registry"
)

// maxPendingClients is how many clients of one device may be pending. If this limit or
// MaxPending is reached, a new client replaces one whose host has more of them, so that no
// host can lock others out or make their codes useless.
const maxPendingClients = 4

// pendings holds the activation codes of pending clients. A code belongs to one client:
// another client of the same device cannot take it. They are only in memory: a device
// repeats its check every half minute, and gets a new code after a restart.
type pendings struct {
	mu       sync.Mutex
	byDevice map[devices.ID][]pending // oldest first
	codes    map[string]devices.ID
	byHost   map[netip.Addr]int // number of codes; those of other nodes have the zero address
	wrong    int                // wrong codes since wrongAt
	wrongAt  time.Time
}

type pending struct {
	clientID  string
	code      string
	challenge string
	answered  bool // the challenge was answered; the next check creates another
	renewal   int  // number of earlier challenges
	expires   time.Time
	host      netip.Addr    // whose limits apply to the request; zero if another node received it
	address   netip.Addr    // that the last request came from
	since     time.Time     // when the client got the code
	remote    bool          // another node gave it the code
	known     bool          // another client of the device is admitted
	facts     devices.Facts // reported by the device
}

func newPendings() *pendings {
	return &pendings{byDevice: map[devices.ID][]pending{}, codes: map[string]devices.ID{}, byHost: map[netip.Addr]int{}}
}

// get returns the code of a pending client, a fresh one if it has none. known means that
// another client of the device is admitted.
func (p *pendings) get(c CheckIn, known bool, now time.Time) (found pending, fresh bool, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	id, clientID, host := c.Device, c.ClientID, c.From
	p.expireLocked(id, now)
	for i := range p.byDevice[id] {
		if old := &p.byDevice[id][i]; old.clientID == clientID {
			old.facts, old.address = c.facts(now), c.Address
			if old.answered {
				old.challenge, old.answered, old.renewal = newChallenge(), false, old.renewal+1
				return *old, true, nil
			}
			return *old, false, nil
		}
	}
	if len(p.codes) >= MaxPending {
		for other := range p.byDevice {
			p.expireLocked(other, now)
		}
		if len(p.codes) >= MaxPending && !p.evictLocked(host) {
			return pending{}, false, devices.Errorf(devices.CodeUnavailable, "%d devices are pending approval already; approve or forget some", MaxPending)
		}
	}
	if waiting := p.byDevice[id]; len(waiting) >= maxPendingClients {
		at := replaceable(waiting, host)
		if at < 0 {
			return pending{}, false, devices.Errorf(devices.CodeUnavailable, "%d clients are pending for device %s already; approve one, or try again in %v", maxPendingClients, id, CodeLifetime)
		}
		p.removeLocked(id, at)
	}
	next := pending{clientID: clientID, code: p.unusedCode(), challenge: newChallenge(), expires: now.Add(CodeLifetime), host: host, address: c.Address, since: now,
		known: known, facts: c.facts(now)}
	p.addLocked(id, next)
	return next, true, nil
}

func (p *pendings) addLocked(id devices.ID, next pending) {
	p.byDevice[id] = append(p.byDevice[id], next)
	p.codes[next.code] = id
	p.byHost[next.host]++
}

// removeLocked removes one pending client of a device.
func (p *pendings) removeLocked(id devices.ID, at int) {
	waiting := p.byDevice[id]
	old := waiting[at]
	delete(p.codes, old.code)
	if p.byHost[old.host]--; p.byHost[old.host] <= 0 {
		delete(p.byHost, old.host)
	}
	if len(waiting) == 1 {
		delete(p.byDevice, id)
		return
	}
	p.byDevice[id] = slices.Delete(waiting, at, at+1)
}

// evictLocked removes a client of the host that has the most, if that is more than this
// host has.
func (p *pendings) evictLocked(host netip.Addr) bool {
	most, n := host, p.byHost[host]+1
	for other, count := range p.byHost {
		if count > n {
			most, n = other, count
		}
	}
	if most == host {
		return false
	}
	for id, waiting := range p.byDevice {
		if at := slices.IndexFunc(waiting, func(w pending) bool { return w.host == most }); at >= 0 {
			p.removeLocked(id, at)
			return true
		}
	}
	return false
}

// replaceable returns the index of the client that one of this host replaces: the newest of
// the host that has the most, if that has more than this one would have; else the oldest of
// this host; -1: none.
func replaceable(waiting []pending, host netip.Addr) (at int) {
	count := map[netip.Addr]int{}
	for _, w := range waiting {
		count[w.host]++
	}
	at = -1
	for i, w := range waiting {
		if w.host != host && count[w.host] > count[host]+1 && (at < 0 || count[w.host] >= count[waiting[at].host]) {
			at = i
		}
	}
	if at < 0 {
		at = slices.IndexFunc(waiting, func(w pending) bool { return w.host == host })
	}
	return at
}

// addRemote adds a code that another node created: the device or the operator may use any
// node next. A code that is in use here for another device is ignored; the other device gets
// a new one within half a minute.
func (p *pendings) addRemote(c *devices.PendingClient, now time.Time) {
	id := c.Device
	next := pending{clientID: c.ClientID, code: c.Code, challenge: c.Challenge, renewal: c.Renewal, expires: now.Add(CodeLifetime), address: c.Address, since: c.Since,
		remote: true, known: c.Known, facts: c.Facts}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.expireLocked(id, now)
	if other, taken := p.codes[next.code]; taken && other != id || len(p.codes) >= MaxPending {
		return
	}
	waiting := p.byDevice[id]
	for i, old := range waiting {
		if old.clientID == next.clientID {
			if old.code < next.code || old.code == next.code && !next.renews(old) {
				return // both nodes created one at the same time; both keep the lower code
			}
			if old.code == next.code {
				next.expires = old.expires
			}
			next.host = old.host
			p.removeLocked(id, i)
			break
		}
	}
	if waiting := p.byDevice[id]; len(waiting) >= maxPendingClients {
		at := replaceable(waiting, next.host)
		if at < 0 {
			return
		}
		p.removeLocked(id, at)
	}
	p.addLocked(id, next)
}

// renews reports whether a challenge replaces another one of the same code; of two that nodes
// created at the same time both keep the lower one.
func (p pending) renews(old pending) bool {
	return p.renewal > old.renewal || p.renewal == old.renewal && p.challenge < old.challenge
}

// expireLocked removes the expired codes of one device.
func (p *pendings) expireLocked(id devices.ID, now time.Time) {
	for len(p.byDevice[id]) > 0 && !now.Before(p.byDevice[id][0].expires) {
		p.removeLocked(id, 0)
	}
}

// unusedCode returns a random unused code: of a million, at most MaxPending are in use.
func (p *pendings) unusedCode() string {
	for {
		n, err := rand.Int(rand.Reader, big.NewInt(1_000_000))
		if err != nil {
			panic(err) // crypto/rand never fails
		}
		code := fmt.Sprintf("%06d", n)
		if _, taken := p.codes[code]; !taken {
			return code
		}
	}
}

func newChallenge() string {
	var b [16]byte
	rand.Read(b[:]) // never fails (crypto/rand)
	return hex.EncodeToString(b[:])
}

// byCode returns the device and client with this code.
func (p *pendings) byCode(code string, now time.Time) (devices.ID, string, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if now.Sub(p.wrongAt) > wrongCodeWindow {
		p.wrong, p.wrongAt = 0, now
	}
	if p.wrong >= MaxWrongCodes {
		return "", "", devices.Errorf(devices.CodeForbidden, "too many wrong codes; try again in a minute, or approve the device by its id")
	}
	id := p.codes[code]
	p.expireLocked(id, now)
	for _, waiting := range p.byDevice[id] {
		if waiting.code == code {
			return id, waiting.clientID, nil
		}
	}
	p.wrong++
	return "", "", devices.Errorf(devices.CodeDeviceUnknown, "no pending device has the code %s; codes are valid for %v", code, CodeLifetime)
}

// has reports whether a client of the device has a valid code.
func (p *pendings) has(id devices.ID, now time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.expireLocked(id, now)
	return len(p.byDevice[id]) > 0
}

// clients returns the pending clients of a device.
func (p *pendings) clients(id devices.ID) []pending {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.expireLocked(id, time.Now())
	return slices.Clone(p.byDevice[id])
}

// news returns the news about a pending client.
func (p *pending) news(id devices.ID) *devices.PendingClient {
	return &devices.PendingClient{Device: id, ClientID: p.clientID, Code: p.code, Challenge: p.challenge, Renewal: p.renewal, Known: p.known, Facts: p.facts,
		Address: p.address, Since: p.since}
}

// all returns the pending clients of all devices.
func (p *pendings) all(now time.Time) map[devices.ID][]pending {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := make(map[devices.ID][]pending, len(p.byDevice))
	for id := range p.byDevice {
		p.expireLocked(id, now)
		if waiting := p.byDevice[id]; len(waiting) > 0 {
			out[id] = slices.Clone(waiting)
		}
	}
	return out
}

// drop removes all pending clients of a device.
func (p *pendings) drop(id devices.ID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for len(p.byDevice[id]) > 0 {
		p.removeLocked(id, 0)
	}
}

// dropAdmitted removes the pending clients of a device once one of them is admitted, or the
// device is forgotten.
func (p *pendings) dropAdmitted(id devices.ID, r *registry.Registry) {
	for _, w := range p.clients(id) {
		if status := r.Status(id, w.clientID); status.Admits() || !status.Known && w.known {
			p.drop(id)
			return
		}
	}
}

// dropRefused removes the pending clients of a device that are refused.
func (p *pendings) dropRefused(id devices.ID, refused devices.Refused) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for at := len(p.byDevice[id]) - 1; at >= 0; at-- {
		if refused.Has(p.byDevice[id][at].clientID) {
			p.removeLocked(id, at)
		}
	}
}
