package node

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"strconv"
	"syscall"

	"fleetd/internal/config"
	"fleetd/internal/datadir"
	"fleetd/internal/udpaudio"
)

// listeners opens the node's ports. If a default port is in use, a free port is chosen while
// the fleet has no device. A port that was chosen before or configured must be free,
// otherwise the start fails.
type listeners struct {
	cfg    *config.Config
	dir    *datadir.Dir
	log    *slog.Logger
	stored map[string]string // flag to host:port, as chosen at an earlier start
	fresh  bool              // there is no device
	moved  map[string]bool
}

func newListeners(cfg *config.Config, dir *datadir.Dir, log *slog.Logger, fresh bool) (*listeners, error) {
	l := &listeners{cfg: cfg, dir: dir, log: log, stored: map[string]string{}, fresh: fresh, moved: map[string]bool{}}
	return l, dir.ReadJSON(datadir.FilePorts, &l.stored)
}

// open listens on address, the value of the flag.
func (l *listeners) open(flag, address string) (net.Listener, error) {
	var listener net.Listener
	err := l.choose(flag, address, func(address string) (net.Addr, error) {
		var err error
		if listener, err = net.Listen("tcp", address); err != nil {
			return nil, err
		}
		return listener.Addr(), nil
	})
	return listener, err
}

// openAudio opens the UDP socket for audio.
func (l *listeners) openAudio(address string) (*udpaudio.Table, error) {
	var table *udpaudio.Table
	err := l.choose("udp-listen", address, func(address string) (net.Addr, error) {
		var err error
		if table, err = udpaudio.Listen(address, l.log); err != nil {
			return nil, err
		}
		return net.UDPAddrFromAddrPort(table.Addr()), nil
	})
	return table, err
}

// choose binds the flag's address by the rule of listeners.
func (l *listeners) choose(flag, address string, bind func(address string) (net.Addr, error)) error {
	given := l.cfg.Given(flag)
	if stored, ok := l.stored[flag]; ok && !given {
		address, given = stored, true
	}
	bound, err := bind(address)
	// On other ports than 8883 devices would not use TLS (esp_mqtt.cc:27-32).
	if errors.Is(err, syscall.EADDRINUSE) && !given && l.fresh && flag != "mqtt-tls-listen" {
		host, _, splitErr := net.SplitHostPort(address)
		if splitErr != nil {
			return fmt.Errorf("--%s: %w", flag, splitErr)
		}
		if bound, err = bind(net.JoinHostPort(host, "0")); err == nil {
			l.moved[flag] = true
			l.log.Warn("the default port is in use; using a free port from now on", "flag", "--"+flag, "wanted", address, "using", bound.String())
		}
	}
	if err != nil {
		if errors.Is(err, syscall.EADDRINUSE) {
			return fmt.Errorf("--%s: %s is in use by another program; stop it or choose another port", flag, address)
		}
		return fmt.Errorf("--%s: %w", flag, err)
	}
	if !l.cfg.Given(flag) {
		host, _, _ := net.SplitHostPort(address) // valid, since it was bound
		l.stored[flag] = net.JoinHostPort(host, portOf(bound))
	}
	return nil
}

func portOf(addr net.Addr) string {
	_, port, _ := net.SplitHostPort(addr.String()) // valid for the address of a socket
	return port
}

// save stores the chosen ports.
func (l *listeners) save() error { return l.dir.WriteJSON(datadir.FilePorts, l.stored) }

func port(listener net.Listener) int { return listener.Addr().(*net.TCPAddr).Port }

// publicHost returns the host for devices: the configured one, else the first IPv4 address
// that is not loopback, else loopback.
func publicHost(given string) string {
	if given != "" {
		return given
	}
	addresses, err := net.InterfaceAddrs()
	if err != nil {
		return "127.0.0.1"
	}
	for _, a := range addresses {
		if network, ok := a.(*net.IPNet); ok {
			if ip, ok := netip.AddrFromSlice(network.IP); ok && ip.Unmap().Is4() && !ip.IsLoopback() && !ip.IsLinkLocalUnicast() {
				return ip.Unmap().String()
			}
		}
	}
	return "127.0.0.1"
}

// localURL returns the URL of a listener for programs on this machine.
func localURL(listener net.Listener) string {
	addr := listener.Addr().(*net.TCPAddr)
	host := addr.IP.String()
	if addr.IP.IsUnspecified() {
		host = "127.0.0.1"
	}
	return "http://" + net.JoinHostPort(host, strconv.Itoa(addr.Port))
}
