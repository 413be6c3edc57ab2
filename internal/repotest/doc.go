// Package repotest has the tests of the repository itself: which package may import which, that links and claims in the documents hold,
// that the program's types are right on other systems, and the mutants that tests of the packages must catch. It has no code.
package repotest
