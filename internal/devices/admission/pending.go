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

// maxPendingClients bounds the clients that wait under one device id. Where
// there is no room, under an id or over all, whoever comes takes the place of
// one whose address has more of them, so that no host keeps others out or makes
// their codes worthless.
const maxPendingClients = 4

// pendings holds the activation codes of devices that wait for approval. A
// code belongs to one client: whoever asks under the same id cannot take
// another's place. They live in memory only: a device repeats its check every
// half minute and speaks a new code after a restart.
type pendings struct {
	mu       sync.Mutex
	byDevice map[devices.ID][]pending // oldest first
	codes    map[string]devices.ID
	byHost   map[netip.Addr]int // codes; of other nodes under the zero address
	wrong    int                // codes tried in vain since wrongAt
	wrongAt  time.Time
}

type pending struct {
	clientID  string
	code      string
	challenge string
	spent     bool // the challenge was answered; the next check brings another
	renewal   int  // challenges before it
	expires   time.Time
	host      netip.Addr    // of the request; zero if another node received it
	known     bool          // another client is admitted under the id
	facts     devices.Facts // what the device reported
}

func newPendings() *pendings {
	return &pendings{byDevice: map[devices.ID][]pending{}, codes: map[string]devices.ID{}, byHost: map[netip.Addr]int{}}
}

// get returns the code of a waiting client, a fresh one if it has none. known
// tells whether another client is admitted under the id.
func (p *pendings) get(c CheckIn, known bool, now time.Time) (found pending, fresh bool, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	id, clientID, host := c.Device, c.ClientID, c.From
	p.expireLocked(id, now)
	for i := range p.byDevice[id] {
		if old := &p.byDevice[id][i]; old.clientID == clientID {
			old.facts = c.facts(now)
			if old.spent {
				old.challenge, old.spent, old.renewal = newChallenge(), false, old.renewal+1
				return *old, true, nil
			}
			return *old, false, nil
		}
	}
	if len(p.codes) >= MaxPending {
		for other := range p.byDevice {
			p.expireLocked(other, now)
		}
		if len(p.codes) >= MaxPending && !p.makeRoomLocked(host) {
			return pending{}, false, devices.Errorf(devices.CodeUnavailable, "%d devices wait for approval already; approve or forget some", MaxPending)
		}
	}
	if waiting := p.byDevice[id]; len(waiting) >= maxPendingClients {
		at := replaceable(waiting, host)
		if at < 0 {
			return pending{}, false, devices.Errorf(devices.CodeUnavailable, "%d clients wait under the id %s already; approve one, or ask again in %v", maxPendingClients, id, CodeLife)
		}
		p.removeLocked(id, at)
	}
	next := pending{clientID: clientID, code: p.unusedCode(), challenge: newChallenge(), expires: now.Add(CodeLife), host: host, known: known, facts: c.facts(now)}
	p.addLocked(id, next)
	return next, true, nil
}

func (p *pendings) addLocked(id devices.ID, next pending) {
	p.byDevice[id] = append(p.byDevice[id], next)
	p.codes[next.code] = id
	p.byHost[next.host]++
}

// removeLocked ends the wait of one client of a device.
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

// makeRoomLocked ends the wait of a client of the host that has the most, if
// that is more than this one has.
func (p *pendings) makeRoomLocked(host netip.Addr) bool {
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

// replaceable is the client under an id that is replaced by one of this host: the
// newest of the host that has the most there, if that has more than this one
// would have; of this host's own, the oldest. -1: nobody.
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

// learn takes a code that another node gave out: the device may ask any node
// next, and the operator too. One that is taken here belongs to another device
// and is passed over; its device gets a new one within the half minute.
func (p *pendings) learn(c *devices.Spoken, now time.Time) {
	id := c.Device
	next := pending{clientID: c.ClientID, code: c.Code, challenge: c.Challenge, renewal: c.Renewal, expires: now.Add(CodeLife), known: c.Known, facts: c.Facts}
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
				return // both nodes gave one out at once; both keep the lower
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

// renews tells whether a challenge stands in for another under the same code;
// of two that nodes made at once both keep the lower.
func (p pending) renews(old pending) bool {
	return p.renewal > old.renewal || p.renewal == old.renewal && p.challenge < old.challenge
}

// expireLocked removes the codes of one device that are past their life.
func (p *pendings) expireLocked(id devices.ID, now time.Time) {
	for len(p.byDevice[id]) > 0 && !now.Before(p.byDevice[id][0].expires) {
		p.removeLocked(id, 0)
	}
}

// unusedCode draws until the code is free: with MaxPending of a million taken
// that is almost always the first.
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

// byCode finds the device and client that speak this code.
func (p *pendings) byCode(code string, now time.Time) (devices.ID, string, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if now.Sub(p.wrongAt) > wrongCodeSpan {
		p.wrong, p.wrongAt = 0, now
	}
	if p.wrong >= MaxWrongCodes {
		return "", "", devices.Errorf(devices.CodeForbidden, "too many wrong codes; wait a minute, or approve the device by its id")
	}
	id := p.codes[code]
	p.expireLocked(id, now)
	for _, waiting := range p.byDevice[id] {
		if waiting.code == code {
			return id, waiting.clientID, nil
		}
	}
	p.wrong++
	return "", "", devices.Errorf(devices.CodeDeviceUnknown, "no device waits with the code %s; codes live %v", code, CodeLife)
}

// waits tells whether a client of the device has a code that is still good.
func (p *pendings) waits(id devices.ID, now time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.expireLocked(id, now)
	return len(p.byDevice[id]) > 0
}

// clients are those that wait under an id.
func (p *pendings) clients(id devices.ID) []pending {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.expireLocked(id, time.Now())
	return slices.Clone(p.byDevice[id])
}

// spoken is the news of a client that waits.
func (p *pending) spoken(id devices.ID) *devices.Spoken {
	return &devices.Spoken{Device: id, ClientID: p.clientID, Code: p.code, Challenge: p.challenge, Renewal: p.renewal, Known: p.known, Facts: p.facts}
}

// all are the devices under whose id a client waits, each with its latest.
func (p *pendings) all(now time.Time) map[devices.ID]pending {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := make(map[devices.ID]pending, len(p.byDevice))
	for id := range p.byDevice {
		p.expireLocked(id, now)
		if waiting := p.byDevice[id]; len(waiting) > 0 {
			out[id] = waiting[len(waiting)-1]
		}
	}
	return out
}

// drop forgets every client that waits under the id.
func (p *pendings) drop(id devices.ID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for len(p.byDevice[id]) > 0 {
		p.removeLocked(id, 0)
	}
}

// dropAdmitted ends the wait under an id once one of its clients is admitted, or
// the device is forgotten.
func (p *pendings) dropAdmitted(id devices.ID, r *registry.Registry) {
	for _, w := range p.clients(id) {
		if is := r.Standing(id, w.clientID); is.Admits() || !is.Known && w.known {
			p.drop(id)
			return
		}
	}
}
