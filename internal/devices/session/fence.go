//go:build !brokenfence

package session

// fenced makes a node obey claims. The build tag brokenfence disables it, which the chaos
// test must detect.
const fenced = true
