// Package browser tests the console in Chromium, against nodes and simulated devices. It is a module
// of its own, so that the driver of the browser is not among the dependencies of fleetd.
package browser
