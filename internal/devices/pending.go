package devices

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"math/big"
	"sync"
	"time"
)

// maxPendingClients bounds the clients that wait under one device id; the
// newest take the place of the oldest.
const maxPendingClients = 4

// pendings holds the activation codes of devices that wait for approval. A
// code belongs to one client: whoever asks under the same id cannot take
// another's place. They live in memory only: a device repeats its check every
// half minute and speaks a new code after a restart.
type pendings struct {
	mu       sync.Mutex
	byDevice map[ID][]pending // oldest first
	codes    map[string]ID
	wrong    int // codes tried in vain since wrongAt
	wrongAt  time.Time
}

type pending struct {
	clientID  string
	code      string
	challenge string
	spent     bool // the challenge was answered; the next check brings another
	renewal   int  // challenges before it
	expires   time.Time
}

func newPendings() *pendings {
	return &pendings{byDevice: map[ID][]pending{}, codes: map[string]ID{}}
}

// get returns the code of a waiting client, a fresh one if it has none.
func (p *pendings) get(id ID, clientID string, now time.Time) (found pending, fresh bool, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.expireLocked(id, now)
	for i := range p.byDevice[id] {
		if old := &p.byDevice[id][i]; old.clientID == clientID {
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
		if len(p.codes) >= MaxPending {
			return pending{}, false, fail(CodeUnavailable, "%d devices wait for approval already", MaxPending)
		}
	}
	if waiting := p.byDevice[id]; len(waiting) >= maxPendingClients {
		delete(p.codes, waiting[0].code)
		p.byDevice[id] = waiting[1:]
	}
	next := pending{clientID: clientID, code: p.unusedCode(), challenge: newChallenge(), expires: now.Add(CodeLife)}
	p.byDevice[id] = append(p.byDevice[id], next)
	p.codes[next.code] = id
	return next, true, nil
}

// learn takes a code that another node gave out: the device may ask any node
// next, and the operator too. One that is taken here belongs to another device
// and is passed over; its device gets a new one within the half minute.
func (p *pendings) learn(id ID, next pending, now time.Time) {
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
			delete(p.codes, old.code)
			waiting = append(waiting[:i:i], waiting[i+1:]...)
			break
		}
	}
	if len(waiting) >= maxPendingClients {
		delete(p.codes, waiting[0].code)
		waiting = waiting[1:]
	}
	p.byDevice[id] = append(waiting, next)
	p.codes[next.code] = id
}

// renews tells whether a challenge stands in for another under the same code;
// of two that nodes made at once both keep the lower.
func (p pending) renews(old pending) bool {
	return p.renewal > old.renewal || p.renewal == old.renewal && p.challenge < old.challenge
}

// expireLocked removes the codes of one device that are past their life.
func (p *pendings) expireLocked(id ID, now time.Time) {
	waiting := p.byDevice[id]
	for len(waiting) > 0 && !now.Before(waiting[0].expires) {
		delete(p.codes, waiting[0].code)
		waiting = waiting[1:]
	}
	if len(waiting) == 0 {
		delete(p.byDevice, id)
		return
	}
	p.byDevice[id] = waiting
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
func (p *pendings) byCode(code string, now time.Time) (ID, string, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if now.Sub(p.wrongAt) > wrongCodeSpan {
		p.wrong, p.wrongAt = 0, now
	}
	if p.wrong >= MaxWrongCodes {
		return "", "", fail(CodeForbidden, "too many wrong codes; wait a minute, or approve the device by its id")
	}
	id := p.codes[code]
	p.expireLocked(id, now)
	for _, waiting := range p.byDevice[id] {
		if waiting.code == code {
			return id, waiting.clientID, nil
		}
	}
	p.wrong++
	return "", "", fail(CodeDeviceUnknown, "no device waits with the code %s; codes live %v", code, CodeLife)
}

// waits tells whether a client of the device has a code that is still good.
func (p *pendings) waits(id ID, now time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.expireLocked(id, now)
	return len(p.byDevice[id]) > 0
}

// clients is how many wait under an id.
func (p *pendings) clients(id ID) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.byDevice[id])
}

// drop forgets every client that waits under the id.
func (p *pendings) drop(id ID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, waiting := range p.byDevice[id] {
		delete(p.codes, waiting.code)
	}
	delete(p.byDevice, id)
}
