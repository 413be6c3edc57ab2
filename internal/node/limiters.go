package node

import (
	"net"
	"net/http"
	"net/netip"

	"fleetd/internal/connlimit"
)

// Descriptors reserved for the rest of the node: its API, database, NATS and files.
// Connections of the API and the gateway's API get half of them.
const (
	reservedFiles    = 200
	maxReservedFiles = 4096
	reservedShare    = 16 // the fraction 1/16 of all descriptors
)

// deviceFiles returns how many descriptors devices get; 0: unlimited.
func deviceFiles(limit int) int {
	return max(limit-min(max(reservedFiles, limit/reservedShare), maxReservedFiles), limit/2)
}

// apiFiles returns how many connections the API and the gateway's API get together; 0:
// unlimited.
func apiFiles(limit int) int { return (limit - deviceFiles(limit)) / 2 }

// natsFiles returns how many connections the embedded NATS accepts; 0: its default.
func natsFiles(limit int) int { return (limit - deviceFiles(limit)) / 4 }

// pace returns the pace of request bodies at a listener.
func (n *node) pace(flag string) connlimit.BodyPace {
	pace := connlimit.DefaultPace
	pace.Late = &n.limited[flag].Late
	return pace
}

// openLimited opens a port for devices, with the limits of deviceLimiter.
func (n *node) openLimited(flag, address string) (net.Listener, error) {
	l, err := n.listeners.open(flag, address)
	if err != nil {
		return nil, err
	}
	if n.cfg.ProxyProtocol == "on" {
		proxyListeners := connlimit.NewProxyListener(l, n.cfg.TrustedProxies, n.log)
		n.proxyListeners[flag], l = proxyListeners, proxyListeners
	}
	n.limited[flag] = n.deviceLimiter.Limit(l)
	return n.limited[flag], nil
}

// openAPI opens a port for people and programs, with the limits of apiLimiter: half of its
// connections are for callers that are not authenticated yet.
func (n *node) openAPI(flag, address string) (net.Listener, error) {
	l, err := n.listeners.open(flag, address)
	if err != nil {
		return nil, err
	}
	n.limited[flag] = n.apiLimiter.LimitCallers(l)
	return n.limited[flag], nil
}

// perAddress gives each client of a trusted proxy a share of the requests in progress, as the
// limiter does for direct connections.
func (n *node) perAddress(next http.Handler) http.Handler {
	shares := connlimit.NewShares[netip.Addr](n.cfg.ConnectionsPerAddress)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		addr := connlimit.ClientAddress(r, n.cfg.TrustedProxies)
		if peer, err := netip.ParseAddrPort(r.RemoteAddr); err != nil || peer.Addr().Unmap() == addr {
			next.ServeHTTP(w, r)
			return
		}
		host := connlimit.AddressKey(addr)
		if !shares.Acquire(host) {
			n.limited["device-listen"].OverShare.Add(1)
			w.Header().Set("Retry-After", "10")
			w.Header().Set("Connection", "close") // otherwise net/http would wait for the body first
			http.Error(w, "too many concurrent requests from this address; try again", http.StatusServiceUnavailable)
			return
		}
		defer shares.Release(host)
		next.ServeHTTP(w, r)
	})
}
