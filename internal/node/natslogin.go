package node

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"fleetd/internal/access"
	"fleetd/internal/clock"
	"fleetd/internal/credential"
)

// loginCheck is how often connections to the embedded NATS are checked for keys that have
// ended.
const loginCheck = 5 * time.Second

// natsLogins checks logins to the embedded NATS: the admin token gives access to all
// subjects, an API key for all devices to those of its scopes. It is safe for concurrent use.
type natsLogins struct {
	mint   *credential.Mint
	prefix string
	keys   atomic.Pointer[access.Registry] // nil until the core is started
	server *atomic.Pointer[server.Server]  // the running one

	mu      sync.Mutex
	callers map[uint64]*access.Caller // by connection id
}

// Check implements server.Authentication.
func (l *natsLogins) Check(client server.ClientAuthentication) bool {
	token := client.GetOpts().Token
	if l.mint.IsAdmin(token) {
		return true
	}
	keys := l.keys.Load()
	if keys == nil {
		return false
	}
	who, err := keys.Authenticate(token, clock.Now())
	if err != nil || who.Limited() { // subjects do not contain the labels of devices
		return false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.connectionsLocked(who) >= natsOfKey {
		return false
	}
	client.RegisterUser(&server.User{Username: who.Key, Permissions: l.permissions(who)})
	l.callers[client.GetID()] = who
	return true
}

// connectionsLocked returns the number of connections of a key.
func (l *natsLogins) connectionsLocked(who *access.Caller) (open int) {
	s := l.server.Load()
	if s == nil { // the server has just started
		return 0
	}
	for id, other := range l.callers {
		switch {
		case other.Key != who.Key:
		case s.GetClient(id) == nil: // it has disconnected
			delete(l.callers, id)
		default:
			open++
		}
	}
	return open
}

// permissions returns the subjects for a key, the same as deploy/nats/users.conf gives to
// users. Replies are sent to _INBOX.<id of the key>, so that a key cannot read those of another.
func (l *natsLogins) permissions(who *access.Caller) *server.Permissions {
	publish := &server.SubjectPermission{}
	subscribe := &server.SubjectPermission{Allow: []string{"_INBOX." + who.Key + ".>"}}
	devices := l.prefix + ".devices."
	if who.Scopes.Has(access.ScopeEvents) && !who.OwnJobsOnly() { // subjects do not contain the owners of jobs
		subscribe.Allow = append(subscribe.Allow, l.prefix+".jobs.>")
	}
	switch {
	case who.Scopes.Has(access.ScopeAudio):
		publish.Allow = append(publish.Allow, l.prefix+".cmd.*.audio", l.prefix+".cmd.*.send")
		subscribe.Allow = append(subscribe.Allow, devices+">")
	case who.Scopes.Has(access.ScopeEvents):
		subscribe.Allow = append(subscribe.Allow, devices+">")
		subscribe.Deny = append(subscribe.Deny, devices+"*.audio")
		if !who.Scopes.Has(access.ScopePhotos) { // it contains the question
			subscribe.Deny = append(subscribe.Deny, devices+"*.photo")
		}
	}
	if who.Scopes.Has(access.ScopeCall) || who.Scopes.Has(access.ScopeUser) {
		publish.Allow = append(publish.Allow, l.prefix+".cmd.*.call")
	}
	if who.Scopes.Has(access.ScopeJobs) {
		publish.Allow = append(publish.Allow, l.prefix+".cmd.jobs")
	}
	p := &server.Permissions{Publish: publish, Subscribe: subscribe}
	if who.Scopes.Has(access.ScopePhotos) {
		subscribe.Allow = append(subscribe.Allow, l.prefix+".vision.explain")
		p.Response = &server.ResponsePermission{MaxMsgs: 1, Expires: time.Minute}
	}
	if len(publish.Allow) == 0 {
		publish.Deny = []string{">"}
	}
	return p
}

// watch closes connections whose key has ended, until ctx ends.
func (l *natsLogins) watch(ctx context.Context, keys *access.Registry) {
	l.keys.Store(keys)
	for now := range clock.Ticks(ctx, loginCheck) {
		l.endAll(keys, now)
	}
}

func (l *natsLogins) endAll(keys *access.Registry, now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.server.Load()
	for id, who := range l.callers {
		switch {
		case s.GetClient(id) == nil: // it has disconnected
			delete(l.callers, id)
		case keys.Valid(who, now) != nil:
			_ = s.DisconnectClientByID(id) // it may have disconnected just now
			delete(l.callers, id)
		}
	}
}
