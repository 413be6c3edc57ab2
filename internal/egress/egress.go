// Package egress decides to which addresses this node connects for somebody else: public ones, and those that an operator
// allows. What decides is the address that is dialled, whatever a name meant when it was looked at before.
package egress

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"time"
)

// Allow decides to which addresses a client may connect: public ones, and those of its setting. It is immutable.
type Allow struct {
	setting  string
	networks []netip.Prefix
	hosts    []string
}

// Parse reads what is allowed beside public addresses: networks such as 10.0.0.0/8, addresses, and names of hosts, which
// are allowed whatever they resolve to. setting is the name of the setting, for refusals; empty: there is none.
func Parse(setting string, entries []string) (*Allow, error) {
	a := &Allow{setting: setting}
	for _, entry := range entries {
		if prefix, err := netip.ParsePrefix(entry); err == nil {
			a.networks = append(a.networks, prefix.Masked())
		} else if addr, err := netip.ParseAddr(entry); err == nil {
			a.networks = append(a.networks, netip.PrefixFrom(addr.Unmap(), addr.Unmap().BitLen()))
		} else if isHost(entry) {
			a.hosts = append(a.hosts, strings.ToLower(entry))
		} else {
			return nil, fmt.Errorf("must be comma-separated networks such as 10.0.0.0/8, addresses or names of hosts, not %q", entry)
		}
	}
	return a, nil
}

func isHost(text string) bool {
	return text != "" && len(text) <= 253 && strings.Trim(text, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._") == "" && !strings.HasPrefix(text, ".")
}

// reserved are the networks of the IANA registries of special addresses that are not reachable from everywhere, and those
// that contain addresses of IPv4. 168.63.129.16 is the host of a virtual machine on Azure, whatever network that is in.
var reserved = func() (list []netip.Prefix) {
	for _, text := range []string{"0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "168.63.129.16/32", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24", "192.0.2.0/24",
		"192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/3",
		"::/96", "64:ff9b::/96", "64:ff9b:1::/48", "100::/64", "2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20", "5f00::/16", "fc00::/7", "fe80::/9", "ff00::/8"} {
		list = append(list, netip.MustParsePrefix(text))
	}
	return list
}()

// checkAddr returns an error if a client may not connect to this address.
func (a *Allow) checkAddr(addr netip.Addr) error {
	addr = addr.Unmap().WithZone("")
	in := func(p netip.Prefix) bool { return p.Contains(addr) }
	if !slices.ContainsFunc(reserved, in) || slices.ContainsFunc(a.networks, in) {
		return nil
	}
	if a.setting == "" {
		return fmt.Errorf("%s is not a public address", addr)
	}
	return fmt.Errorf("%s is not a public address; an operator can allow it with %s", addr, a.setting)
}

// CheckHost returns an error if the host of a URL is an address to which a client may not connect. A name is checked when
// it is dialled.
func (a *Allow) CheckHost(host string) error {
	if addr, err := netip.ParseAddr(host); err == nil {
		return a.checkAddr(addr)
	}
	return nil
}

// control returns the check of a connection to a host, for net.Dialer: it gets the address that is dialled, which the
// name may have changed to since any earlier look.
func (a *Allow) control(host string) func(network, address string, _ syscall.RawConn) error {
	if slices.Contains(a.hosts, strings.ToLower(strings.TrimSuffix(host, "."))) {
		return nil
	}
	return func(_, address string, _ syscall.RawConn) error {
		text, _, err := net.SplitHostPort(address)
		if err != nil {
			return err
		}
		addr, err := netip.ParseAddr(text)
		if err != nil {
			return err
		}
		return a.checkAddr(addr)
	}
}

// Dialer returns a function for http.Transport that connects only where it may, within timeout.
func (a *Allow) Dialer(timeout time.Duration) func(ctx context.Context, network, address string) (net.Conn, error) {
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		host, _, err := net.SplitHostPort(address)
		if err != nil {
			return nil, err
		}
		dialer := net.Dialer{Timeout: timeout, Control: a.control(host)}
		return dialer.DialContext(ctx, network, address)
	}
}
