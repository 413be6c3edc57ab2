package node

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"fleetd/internal/access"
	"fleetd/internal/credential"
)

// loginCheck is how often connections to the embedded NATS are checked for keys that
// have ended.
const loginCheck = 5 * time.Second

// natsLogins decides who may connect to the embedded NATS, where it asks: whoever shows
// the admin token, for everything, or an API key for all devices, for what its
// scopes open. It is safe for concurrent use.
type natsLogins struct {
	mint   *credential.Mint
	prefix string
	keys   atomic.Pointer[access.Registry] // nil until the core has them

	mu sync.Mutex
	in map[uint64]*access.Caller // by id of the connection
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
	who, err := keys.Authenticate(token, time.Now())
	if err != nil || who.Limited() { // a subject does not tell the labels of its device
		return false
	}
	client.RegisterUser(&server.User{Username: who.Key, Permissions: l.permissions(who)})
	l.mu.Lock()
	defer l.mu.Unlock()
	l.in[client.GetID()] = who
	return true
}

// permissions are the subjects that a key opens, as deploy/nats/users.conf gives them to
// users. Replies come below _INBOX.<id of the key>, so that none hears another's.
func (l *natsLogins) permissions(who *access.Caller) *server.Permissions {
	publish := &server.SubjectPermission{}
	subscribe := &server.SubjectPermission{Allow: []string{"_INBOX." + who.Key + ".>"}}
	devices := l.prefix + ".devices."
	switch {
	case who.Scopes.Has(access.ScopeAudio):
		publish.Allow = append(publish.Allow, l.prefix+".cmd.*.audio", l.prefix+".cmd.*.send")
		subscribe.Allow = append(subscribe.Allow, devices+">")
	case who.Scopes.Has(access.ScopeEvents):
		subscribe.Allow = append(subscribe.Allow, devices+">")
		subscribe.Deny = append(subscribe.Deny, devices+"*.audio")
	}
	if who.Scopes.Has(access.ScopeCall) || who.Scopes.Has(access.ScopeUser) {
		publish.Allow = append(publish.Allow, l.prefix+".cmd.*.call")
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

// watch ends connections whose key has ended, until ctx does.
func (l *natsLogins) watch(ctx context.Context, keys *access.Registry, running func() *server.Server) {
	l.keys.Store(keys)
	ticker := time.NewTicker(loginCheck)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-ticker.C:
			l.endAll(keys, running(), now)
		}
	}
}

func (l *natsLogins) endAll(keys *access.Registry, s *server.Server, now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for id, who := range l.in {
		switch {
		case s.GetClient(id) == nil: // it left
			delete(l.in, id)
		case keys.Valid(who, now) != nil:
			_ = s.DisconnectClientByID(id) // it may have left just now
			delete(l.in, id)
		}
	}
}
