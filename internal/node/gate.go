package node

import (
	"net"
	"net/http"
	"net/netip"

	"fleetd/internal/lobby"
)

// Descriptors that devices leave to the rest of the node: its API, database,
// NATS and files. Connections of the API and the gateway's API get half of them.
const (
	reservedFiles    = 200
	maxReservedFiles = 4096
	reservedShare    = 16 // of all descriptors, one in so many
)

// deviceFiles is how many of them devices get; 0: as many as they like.
func deviceFiles(limit int) int {
	return max(limit-min(max(reservedFiles, limit/reservedShare), maxReservedFiles), limit/2)
}

// apiFiles is how many connections the API and the gateway's API get together;
// 0: as many as they like.
func apiFiles(limit int) int { return (limit - deviceFiles(limit)) / 2 }

// pace is that of bodies that come in at a listener.
func (n *node) pace(flag string) lobby.Pace {
	pace := lobby.DefaultPace
	pace.Late = &n.guarded[flag].Late
	return pace
}

// openGuarded opens a port of the devices, behind the gate.
func (n *node) openGuarded(flag, address string) (net.Listener, error) {
	l, err := n.listeners.open(flag, address)
	if err != nil {
		return nil, err
	}
	if n.cfg.ProxyProtocol == "on" {
		proxied := lobby.NewProxied(l, n.cfg.TrustedProxies, n.log)
		n.proxied[flag], l = proxied, proxied
	}
	n.guarded[flag] = n.gate.Guard(l)
	return n.guarded[flag], nil
}

// openAPI opens a port of people and programs, behind their gate: half of its
// connections are for callers that have not proven yet who they are.
func (n *node) openAPI(flag, address string) (net.Listener, error) {
	l, err := n.listeners.open(flag, address)
	if err != nil {
		return nil, err
	}
	n.guarded[flag] = n.apiGate.GuardTimed(l)
	return n.guarded[flag], nil
}

// perAddress gives each address behind a trusted proxy its share of the
// requests in progress, as the gate does with connections that come directly.
func (n *node) perAddress(next http.Handler) http.Handler {
	shares := lobby.NewShares(n.cfg.ConnectionsPerAddress)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		addr := lobby.ClientAddress(r, n.cfg.TrustedProxies)
		if peer, err := netip.ParseAddrPort(r.RemoteAddr); err != nil || peer.Addr().Unmap() == addr {
			next.ServeHTTP(w, r)
			return
		}
		if !shares.Enter(addr) {
			n.guarded["device-listen"].Crowded.Add(1)
			w.Header().Set("Retry-After", "10")
			w.Header().Set("Connection", "close") // or net/http would wait for the body first
			http.Error(w, "too many requests of this address at once; try again", http.StatusServiceUnavailable)
			return
		}
		defer shares.Leave(addr)
		next.ServeHTTP(w, r)
	})
}
