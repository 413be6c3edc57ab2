package firmware

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strconv"
	"sync"
	"time"
)

const (
	dialTimeout = 20 * time.Second
	// devicesPerSource keeps sockets plus their TIME_WAIT remains of one source address below the 28,232 ports Linux
	// gives out by default.
	devicesPerSource = 8000
	resolveFor       = 30 * time.Second
	// receiveBuffer keeps the system from taking much more than a device has read: a server counts it as received. A chip has
	// 5,760 bytes (CONFIG_LWIP_TCP_WND_DEFAULT), with which Linux would delay each window on the loopback.
	receiveBuffer = 32 << 10
)

// dialer opens the TCP and TLS connections of all devices. It is safe for concurrent use.
type dialer struct {
	tls *tls.Config

	mu    sync.Mutex
	names map[string]resolved
}

type resolved struct {
	addr  netip.Addr
	until time.Time
}

// newDialer prepares TLS: system roots unless a CA file is given, no verification at all with insecure.
func newDialer(caFile string, insecure bool) (*dialer, error) {
	// A chip has no session cache, and 18,000 virtual ones must not share one.
	cfg := &tls.Config{InsecureSkipVerify: insecure, MinVersion: tls.VersionTLS12}
	if caFile != "" {
		pem, err := os.ReadFile(caFile)
		if err != nil {
			return nil, fmt.Errorf("--ca: %w", err)
		}
		cfg.RootCAs = x509.NewCertPool()
		if !cfg.RootCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("--ca: %s holds no PEM certificate", caFile)
		}
	}
	return &dialer{tls: cfg, names: make(map[string]resolved)}, nil
}

// dial connects to the host of u. index spreads a big fleet over several loopback source addresses.
func (d *dialer) dial(ctx context.Context, index int, u deviceURL) (net.Conn, error) {
	addr, err := d.resolve(ctx, u.host)
	if err != nil {
		return nil, err
	}
	nd := net.Dialer{Timeout: dialTimeout, KeepAlive: -1, Control: asOnAChip}
	if source := loopbackSource(addr, index); source.IsValid() {
		nd.LocalAddr = &net.TCPAddr{IP: source.AsSlice()}
	}
	conn, err := nd.DialContext(ctx, "tcp", net.JoinHostPort(addr.String(), strconv.Itoa(u.port)))
	if err != nil {
		return nil, err
	}
	if !u.secure {
		return conn, nil
	}
	cfg := d.tls.Clone()
	cfg.ServerName = u.host
	secure := tls.Client(conn, cfg)
	hctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	if err := secure.HandshakeContext(hctx); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return secure, nil
}

// dialUDP makes a UDP socket that receives from this address only, as the device's is connected.
func (d *dialer) dialUDP(ctx context.Context, index int, host string, port int) (*net.UDPConn, error) {
	addr, err := d.resolve(ctx, host)
	if err != nil {
		return nil, err
	}
	var local *net.UDPAddr
	if source := loopbackSource(addr, index); source.IsValid() {
		local = &net.UDPAddr{IP: source.AsSlice()}
	}
	return net.DialUDP("udp4", local, net.UDPAddrFromAddrPort(netip.AddrPortFrom(addr, uint16(port))))
}

// loopbackSource is 127.0.0.2 and up for devices after the first block, and no address otherwise.
func loopbackSource(target netip.Addr, index int) netip.Addr {
	block := index / devicesPerSource
	if !target.Is4() || !target.IsLoopback() || block == 0 {
		return netip.Addr{}
	}
	return netip.AddrFrom4([4]byte{127, 0, 0, byte(1 + block%250)})
}

// resolve looks each name up once in half a minute: a storm of 18,000 devices must not become one of look-ups.
func (d *dialer) resolve(ctx context.Context, host string) (netip.Addr, error) {
	if addr, err := netip.ParseAddr(host); err == nil {
		return addr, nil
	}
	now := time.Now()
	d.mu.Lock()
	known, ok := d.names[host]
	d.mu.Unlock()
	if ok && now.Before(known.until) {
		return known.addr, nil
	}
	addrs, err := net.DefaultResolver.LookupNetIP(ctx, "ip4", host)
	if err != nil {
		return netip.Addr{}, err
	}
	if len(addrs) == 0 {
		return netip.Addr{}, fmt.Errorf("%s has no IPv4 address", host)
	}
	addr := addrs[0].Unmap()
	d.mu.Lock()
	d.names[host] = resolved{addr: addr, until: now.Add(resolveFor)}
	d.mu.Unlock()
	return addr, nil
}
